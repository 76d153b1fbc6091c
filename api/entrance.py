"""Entrance: what every request passes, in front of FastAPI. Bounds what is in hand, counts, and takes the short way for
single cells, which FastAPI's routing would cost more than MySQL does (docs/http.md, "What it costs")."""

from __future__ import annotations

import time
from collections.abc import Mapping

from fastapi import FastAPI
from starlette.types import Message, Receive, Scope, Send

from api.answer import Answer, problem_answer, send_answer
from api.call import Call
from api.route import Route
from api.services import Services
from schemaless.errors import SchemalessError, Unavailable

UNROUTED = "other"


class Entrance:
    def __init__(self, app: FastAPI, *, cell_routes: Mapping[tuple[str, int], Route], calls_max: int) -> None:
        self._app = app
        self._cell_routes = cell_routes
        self._calls_max = calls_max
        self._in_hand = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._in_hand >= self._calls_max:
            await send_answer(problem_answer(Unavailable(f"{self._in_hand} calls are in hand already")), send)
            return
        self._in_hand += 1
        try:
            await self._serve(scope, receive, send)
        finally:
            self._in_hand -= 1

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.perf_counter()
        services: Services = self._app.state.services
        if scope["method"] == "HEAD":  # the server leaves the body out
            scope = {**scope, "method": "GET"}
        found = self._cell_route(scope)
        if found is None:
            watched = _Watched(send)
            await self._app(scope, receive, watched)
            route = scope.get("route")
            services.metrics.called(getattr(route, "name", UNROUTED), watched.status, time.perf_counter() - began)
        else:
            route, path = found
            answer = await answer_of(route, Call(services, scope, receive, path))
            await send_answer(answer, send)
            services.metrics.called(route.name, answer.status, time.perf_counter() - began)

    def _cell_route(self, scope: Scope) -> tuple[Route, dict[str, str]] | None:
        """/v1/DATASTORE/cells/ROW_KEY/COLUMN[/REF_KEY], by counting parts."""
        parts = scope["path"].split("/")
        route = self._cell_routes.get((scope["method"], len(parts)))
        if route is None or parts[1] != "v1" or parts[3] != "cells" or "" in parts[2:] or parts[-1] == "versions":
            return None
        path = {"datastore": parts[2], "row_key": parts[4], "column": parts[5], "ref_key": parts[-1]}
        return route, path


async def answer_of(route: Route, call: Call) -> Answer:
    """Errors of ours become problems here, for every call of the contract."""
    try:
        return await route.handler(call)
    except SchemalessError as error:
        return problem_answer(error)
    finally:
        call.finish()


class _Watched:
    """A `send` that remembers the status."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 500

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)


def short_ways(routes: tuple[Route, ...]) -> dict[tuple[str, int], Route]:
    """Of the routes of single cells, by method and number of parts of the path."""
    return {
        (route.method, len(f"/v1/x{route.path}".split("/"))): route
        for route in routes
        if route.path.startswith("/cells/{row_key}/{column}") and not route.path.endswith("versions")
    }
