"""Transport: what a driver of the client needs of an HTTP library, and the hosts, token and headers that it sends.

The sync driver's library is urllib3 (schemaless/client/urllib3_transport.py), the other's aiohttp. With httpx a request
cost two to eight times as much CPU, because it parses in Python and looks through all connections at each event.
"""

from __future__ import annotations

import ssl
import tomllib
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol
from urllib.parse import urlencode

import msgspec
from pydantic import SecretStr

from schemaless.client.exchange import MSGPACK, ClientRequest, ClientResponse
from schemaless.config import ClientSettings, OperatorSettings, StackSettings, program_version
from schemaless.errors import Misconfigured, SchemalessError
from schemaless.runtime.kafka_access import KafkaAccess, KafkaAccount, KafkaAddress
from schemaless.runtime.tls import Tls, read_private_text
from schemaless.shapes import shape

_UNAUTHENTICATED = 401
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


class Credentials:
    """The headers of every request. The token among them is looked up again when a host refuses it.

    A token that was given, or is in the environment, stays the same. One in a file or a profile may have been renewed.
    """

    def __init__(self, hosts: Sequence[str], token: str | None) -> None:
        self._found = hosts, token
        self.settings = settings_of(hosts, token)
        self.headers = headers_of(self.settings)

    @property
    def authorization(self) -> str | None:
        return self.headers.get("authorization")

    def renewed(self, response: ClientResponse, sent: str | None) -> bool:
        """Returns whether a response refuses what was sent, and there is another token by now."""
        if response.status != _UNAUTHENTICATED:
            return False
        with suppress(SchemalessError, OSError):
            self.headers.update(headers_of(settings_of(*self._found)))
        return self.authorization != sent


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


# Profiles: named hosts and tokens in a file of the user, for `schemaless --profile NAME`.
#
# A file with tokens that others can read is refused.


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[prod]` in the file: `hosts = ["https://…"]`, and if there are some, `token = "sl_…"` and `ca = "/path"`.

    Hosts are required: the token would go to whatever the environment names.
    """

    hosts: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    token: str | None = None
    ca: str | None = None

    def __repr__(self) -> str:
        return f"Profile(hosts={self.hosts})"


def read_profile(file: Path, name: str) -> Profile:
    """Raises Misconfigured: no such file or profile, unknown entries, or a file that others can read."""
    text = read_private_text(file)
    if text is None:
        raise Misconfigured(f"there is no {file}, so there is no profile {name!r}")
    try:
        profiles: dict[str, Any] = tomllib.loads(text)
        return msgspec.convert(profiles[name], shape(Profile))
    except KeyError:
        raise Misconfigured(f"{file} has no profile {name!r}, only {', '.join(profiles) or 'none'}") from None
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise Misconfigured(f"{file}, profile {name!r}: {error}") from error


# LocalStack: where the embedded stack of SCHEMALESS_HOME serves, for programs that were told of no other servers.
#
# `schemaless up` writes endpoints.json, and `down` removes it. Clients, the probe and users' programs find the stack
# by it.


class _Endpoints(msgspec.Struct, frozen=True):
    api: list[str]
    kafka: str
    kafka_account: KafkaAccount | None = None


@dataclass(frozen=True, slots=True)
class LocalStack:
    """A running stack: the addresses of its API and of Kafka. `home` is its folder."""

    home: Path
    api: list[str]
    kafka: str

    @property
    def topology_file(self) -> Path:
        return self.home / "topology.json"

    def token(self) -> str | None:
        """Returns the token of the stack's own programs, None while access is off."""
        kept = read_private_text(self.home / "token")
        return kept and kept.strip()


def local_stack() -> LocalStack | None:
    """Returns the stack that runs, None if there is none. Raises Misconfigured for a damaged file."""
    home = StackSettings().home.expanduser().absolute()
    file = home / "endpoints.json"
    try:
        found = msgspec.json.decode(file.read_bytes(), type=shape(_Endpoints))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (msgspec.DecodeError, OSError) as error:
        raise Misconfigured(f"{file} can't be read: {error}") from error
    return LocalStack(home, found.api, KafkaAddress(found.kafka, KafkaAccess(found.kafka_account)))


def kafka_address(given: str | None = None) -> str:
    """Returns the given address, else that of SCHEMALESS_KAFKA, else the embedded stack's. Raises Misconfigured."""
    if found := given or OperatorSettings().kafka:
        return found
    stack = local_stack()
    if stack is None:
        raise Misconfigured("no Kafka is known: name its address, set SCHEMALESS_KAFKA, or run `schemaless up`")
    return stack.kafka
