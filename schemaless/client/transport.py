"""Transport: what a driver of the client needs of an HTTP library, and the hosts, token and headers that it sends.

The sync driver's library is urllib3 (schemaless/client/urllib3_transport.py), the other's aiohttp. With httpx a request
cost two to eight times as much CPU, because it parses in Python and looks through all connections at each event.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlencode

from pydantic import SecretStr

from schemaless.client.exchange import MSGPACK, ClientRequest, ClientResponse
from schemaless.client.local_stack import local_stack
from schemaless.client.profiles import read_profile
from schemaless.config import ClientSettings, program_version
from schemaless.errors import Misconfigured
from schemaless.runtime.private_file import read_private_text
from schemaless.runtime.tls import Tls

CHOSEN_PROFILE: ContextVar[str | None] = ContextVar("CHOSEN_PROFILE", default=None)
"""What `schemaless --profile NAME` chose, for all clients of the command."""


def settings_of(hosts: Sequence[str] = (), token: str | None = None) -> ClientSettings:
    """Returns the given hosts and token. What is missing comes from the profile, then from the environment.

    Where nothing names hosts, they are those of the embedded stack that runs here, and so is the token.

    Raises Misconfigured for a profile that doesn't exist, and for a file with a token that others can read.
    """
    settings = ClientSettings()
    given: dict[str, Any] = {}
    name = CHOSEN_PROFILE.get() or settings.profile
    if name:
        profile = read_profile(settings.profiles.expanduser(), name)
        given = {
            "hosts": profile.hosts,
            "token": profile.token and SecretStr(profile.token),
            "ca": Path(profile.ca) if profile.ca else settings.ca,
        }
    elif settings.token is None and settings.token_file is not None:
        kept = read_private_text(settings.token_file)
        given = {"token": SecretStr(kept.strip()) if kept else None}
    if hosts:
        given["hosts"] = tuple(hosts)
    if token is not None:
        given["token"] = SecretStr(token)
    settings = settings.model_copy(update=given)
    if settings.hosts or (stack := local_stack()) is None:
        return settings
    kept = settings.token.get_secret_value() if settings.token else stack.token()
    return settings.model_copy(update={"hosts": tuple(stack.api), "token": SecretStr(kept) if kept else None})


class SyncTransport(Protocol):
    """Sends requests for `Client`. Threads share it."""

    def place(self) -> AbstractContextManager[object]:
        """Bounds the requests in flight (I14). A request holds its place from its first attempt to its last."""

    def send(self, request: ClientRequest, url: str, timeout_s: float) -> ClientResponse:
        """Makes one attempt on the host at `url`. Raises Unavailable, with the reason alone, for whatever failed."""

    def close(self) -> None: ...


class AsyncTransport(Protocol):
    """Sends requests for `AsyncClient`, as SyncTransport does."""

    def place(self) -> AbstractAsyncContextManager[object]: ...

    async def send(self, request: ClientRequest, url: str, timeout_s: float) -> ClientResponse: ...

    async def close(self) -> None: ...


def target_of(request: ClientRequest) -> str:
    """Returns the path and the query. A parameter with several values is given several times."""
    return f"{request.path}?{urlencode(request.params, doseq=True)}" if request.params else request.path


def tls_context(settings: ClientSettings) -> ssl.SSLContext | None:
    """Returns the CAs that are believed, or None where no host needs them: reading them takes as long as many requests.

    Raises Misconfigured for a file of CAs that can't be read.
    """
    if not any(url.lower().startswith("https:") for url in settings.hosts):
        return None
    return ssl.create_default_context() if settings.ca is None else Tls(str(settings.ca)).context()


def headers_of(settings: ClientSettings) -> dict[str, str]:
    """Returns the headers of every request. Raises Misconfigured for a token that no header can hold."""
    headers = {"accept": MSGPACK, "accept-encoding": "gzip, deflate", "user-agent": f"schemaless/{program_version()}"}
    if settings.token is not None:
        token = settings.token.get_secret_value()
        if not (token.isascii() and token.isprintable()):
            raise Misconfigured(
                "the token has characters that no token has: is it the file's name, or has it two lines?"
            )
        headers["authorization"] = f"Bearer {token}"
    return headers
