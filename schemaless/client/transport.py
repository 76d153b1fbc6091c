"""Transport: sets up httpx for both drivers, with connections, time-outs and headers. Limits bound them (I14)."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import httpx
from pydantic import SecretStr

from schemaless.client.attempts import Limits
from schemaless.client.exchange import MSGPACK, ClientRequest, ClientResponse
from schemaless.client.local_stack import local_stack
from schemaless.client.profiles import read_profile
from schemaless.config import ClientSettings
from schemaless.private_file import read_private_text
from schemaless.tls import Tls

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
            "hosts": profile.hosts or settings.hosts,
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


def http_options(settings: ClientSettings, limits: Limits) -> dict[str, Any]:
    """Returns the arguments of httpx.Client and httpx.AsyncClient."""
    headers = {"accept": MSGPACK}
    if settings.token is not None:
        headers["authorization"] = f"Bearer {settings.token.get_secret_value()}"
    verify = {} if settings.ca is None else {"verify": Tls(str(settings.ca)).context()}
    return {
        **verify,
        "headers": headers,
        "limits": httpx.Limits(max_connections=limits.connections_max),
        "trust_env": False,  # the environment is read in schemaless/config.py only
    }


def arguments_of(request: ClientRequest, url: str, attempt_timeout_s: float, limits: Limits) -> dict[str, Any]:
    """Returns the arguments of httpx's request."""
    return {
        "method": request.method,
        "url": url + request.path,
        "params": request.params or None,
        "headers": request.headers,
        "content": request.content or None,
        "timeout": httpx.Timeout(attempt_timeout_s, connect=min(limits.connect_timeout_s, attempt_timeout_s)),
    }


def response_of(response: httpx.Response) -> ClientResponse:
    return ClientResponse(response.status_code, response.headers, response.content)
