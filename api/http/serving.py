"""How a call of the contract is served: its query, payload and answer pass through one place (schemaless/contract/)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Generic, TypeVar

import msgspec

from api.http.asgi import Route
from api.http.content import decode
from api.http.request import Request
from api.http.response import Response, ok_response
from api.state import ApiState
from schemaless.contract.call import ApiCall, verify_bounds
from schemaless.contract.parameters import DRY_RUN, Parameter
from schemaless.ops.tokens import anybody
from schemaless.topology import Datastore

NEVER_KEPT = (b"cache-control", b"no-store")

P = TypeVar("P")
T = TypeVar("T")


class Asked(msgspec.Struct, Generic[P], frozen=True):
    """What a call is asked: its datastore, path, query and payload. A payload that was left out has its defaults."""

    request: Request
    datastore: Datastore
    query: dict[str, str]
    payload: P

    @property
    def path(self) -> Mapping[str, str]:
        return self.request.path

    @property
    def state(self) -> ApiState:
        return self.request.state

    @property
    def who(self) -> str:
        """The name of the caller's token."""
        return (self.request.token or anybody()).name

    def of(self, parameter: Parameter[T]) -> T:
        return parameter.of(self.query)


def serves(call: ApiCall) -> Callable[[Callable[[Asked[Any]], Awaitable[Any]]], Route]:
    """Makes a handler the route of a call. Its name is the call's in metrics and in generated clients.

    It returns the answer, with its status where that isn't the usual one, or a whole response.
    """
    usual = next(iter(call.answers))

    def route(handler: Callable[[Asked[Any]], Awaitable[Any]]) -> Route:
        async def handle(request: Request) -> Response:
            datastore = await request.datastore()
            query = request.query(*call.parameters)
            payload = await _payload(request, call)
            request.is_dry_run = DRY_RUN.of(query) or getattr(payload, "dry_run", False)
            answer = await handler(Asked(request, datastore, query, payload))
            if isinstance(answer, Response):
                return answer
            status, document = answer if isinstance(answer, tuple) else (usual, answer)
            return ok_response(request.response_format(), document, NEVER_KEPT, status=status)

        handle.__name__, handle.__doc__ = handler.__name__, call.says
        return Route(
            call.method,
            call.path,
            handle,
            call.scope,
            call.parameters,
            payload=call.payload,
            optional=call.optional,
            answers=call.answers,
            problems=call.problems,
        )

    return route


async def _payload(request: Request, call: ApiCall) -> Any:
    if call.payload is None:
        return None
    raw = await request.payload(call.payload_bytes_max)
    if not raw and call.optional:
        return call.payload()
    form = request.request_format()
    if not (isinstance(call.payload, type) and issubclass(call.payload, msgspec.Struct)):
        return form.parse(raw)
    payload = decode(raw, form.decoder(call.payload), call.path.rpartition("/")[2])
    verify_bounds(payload)
    return payload
