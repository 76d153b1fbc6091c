"""Entrance: what every request passes, in front of FastAPI. Bounds what is in hand, counts, and takes the short way for
single cells and index queries, which FastAPI's routing would cost more than MySQL does (docs/http.md, "What it costs").
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

import msgspec
from fastapi import FastAPI
from starlette.types import Message, Receive, Scope, Send

from api.http.request import FOLLOWS, HEADERS_ONLY, Request
from api.http.response import Response, problem_response, send_response
from api.http.route import Route
from api.state import ApiState
from schemaless.errors import SchemalessError, Unavailable

UNROUTED = "other"
FOLLOWED = "follow"  # its answers are late on purpose
UNEXPECTED = problem_response(SchemalessError("an unexpected error; the log of this process has it"))
"""Where a handler raises what nobody foresaw: the server logs it, with its trace."""
STOPPING = problem_response(Unavailable("this process stops, before the call had its outcome"))


class ShortWay(msgspec.Struct, frozen=True, gc=False):
    """A route with the positions of its path's names and words."""

    route: Route
    names: tuple[tuple[int, str], ...]
    words: tuple[tuple[int, str], ...]


SHORT = {"/cells/{row_key}/{column}", "/cells/{row_key}/{column}/{ref_key}", "/indexes/{name}/entries"}
ShortWays = Mapping[tuple[str, int, str], ShortWay]
"""By method, number of parts of the path, and the word after the datastore."""


class Entrance:
    def __init__(self, app: FastAPI, *, short_ways: ShortWays, calls_max: int) -> None:
        self._app = app
        self._short_ways = short_ways
        self._calls_max = calls_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state: ApiState = self._app.state.api
        in_flight = state.in_flight
        if in_flight.count >= self._calls_max:
            await send_response(problem_response(Unavailable(f"too many concurrent requests: {in_flight.count}")), send)
            return
        in_flight.count += 1
        try:
            await self._serve(state, scope, receive, send)
        finally:
            in_flight.count -= 1

    async def _serve(self, state: ApiState, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.perf_counter()
        if scope["method"] == "HEAD":  # the server leaves the body out
            scope = {**scope, "method": "GET", HEADERS_ONLY: True}
        found = self._short_way(scope)
        if found is None:
            watched = _Watched(send)
            try:
                await self._app(scope, receive, watched)
            finally:
                name = FOLLOWED if FOLLOWS in scope else getattr(scope.get("route"), "name", UNROUTED)
                state.metrics.called(name, watched.status, watched.answered_at - began)
        else:
            route, path = found
            answer = UNEXPECTED
            try:
                answer = await response_to(route, Request(state, scope, receive, path))
            except asyncio.CancelledError:
                answer = STOPPING
                raise
            finally:
                await send_response(answer, send)
                state.metrics.called(route.name, answer.status, time.perf_counter() - began)

    def _short_way(self, scope: Scope) -> tuple[Route, dict[str, str]] | None:
        """The route of a path, and what the path names, by looking at its parts."""
        parts = scope["path"].split("/")
        way = self._short_ways.get((scope["method"], len(parts), parts[3] if len(parts) > 3 else ""))
        if way is None or "" in parts[1:] or parts[-1] == "versions" or any(parts[n] != word for n, word in way.words):
            return None
        return way.route, {name: parts[n] for n, name in way.names}


async def response_to(route: Route, request: Request) -> Response:
    """Errors of ours become problems here, for every call of the contract."""
    try:
        return await route.handler(request)
    except SchemalessError as error:
        return problem_response(error)
    finally:
        request.finish()


class _Watched:
    """A `send` that remembers the status, and when the answer began."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 500
        self.answered_at = time.perf_counter()

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.answered_at = time.perf_counter()
        await self._send(message)


def short_ways(routes: tuple[Route, ...]) -> ShortWays:
    """Of the routes of single cells and of index entries."""
    ways = {}
    for route in routes:
        if route.path in SHORT:
            parts = f"/v1/{{datastore}}{route.path}".split("/")
            named = [part.startswith("{") for part in parts]
            names = tuple((n, part[1:-1]) for n, part in enumerate(parts) if named[n])
            words = tuple((n, part) for n, part in enumerate(parts) if not named[n])
            ways[route.method, len(parts), parts[3]] = ShortWay(route, names, words)
    return ways
