"""Transport: how httpx is set up for both drivers: connections, time-outs, headers. Bounds come from Limits (I14)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx
from pydantic import SecretStr

from schemaless.client.attempts import Limits
from schemaless.client.call import MSGPACK, Answer, Call
from schemaless.config import ClientSettings


def settings_of(hosts: Sequence[str], token: str | None) -> ClientSettings:
    """What was given; what was not, from the environment."""
    given: dict[str, Any] = {}
    if hosts:
        given["hosts"] = tuple(hosts)
    if token is not None:
        given["token"] = SecretStr(token)
    return ClientSettings(**given)


def http_options(settings: ClientSettings, limits: Limits) -> dict[str, Any]:
    """Arguments of httpx.Client and httpx.AsyncClient."""
    headers = {"accept": MSGPACK}
    if settings.token is not None:
        headers["authorization"] = f"Bearer {settings.token.get_secret_value()}"
    return {
        "headers": headers,
        "limits": httpx.Limits(max_connections=limits.connections_max),
        "trust_env": False,  # the environment is read in schemaless/config.py only
    }


def arguments_of(call: Call, url: str, attempt_timeout_s: float, limits: Limits) -> dict[str, Any]:
    """Arguments of httpx's request."""
    return {
        "method": call.method,
        "url": url + call.path,
        "params": call.params or None,
        "headers": call.headers,
        "content": call.content or None,
        "timeout": httpx.Timeout(attempt_timeout_s, connect=min(limits.connect_timeout_s, attempt_timeout_s)),
    }


def answer_of(response: httpx.Response) -> Answer:
    return Answer(response.status_code, response.headers, response.content)
