"""Route and Router: the table of calls, each with what its documentation says, and how a path finds its handler.

Every call of the contract is a `Route`. FastAPI's router sees none of them: it serves only what a user adds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from operator import itemgetter
from typing import Any

import msgspec

from api.http.parameters import Parameter
from api.http.request import Handler
from schemaless.access import Scope


class Route(msgspec.Struct, frozen=True):
    """One call: method, path, handler, the scope that a caller's token needs (I17), and its documentation.

    `payload` is the shape of what the call takes, `optional` where it may be left out. `answers` has the shape of each
    status that is no problem, None where there is no JSON. `text` has examples of other answers, by media type.
    `problems` lists the statuses that the call has beside those of all calls.
    """

    method: str
    path: str
    handler: Handler
    scope: Scope
    parameters: tuple[Parameter[Any], ...] = ()
    payload: Any = None
    optional: bool = False
    answers: Mapping[int, Any] = {}
    headers: tuple[Parameter[Any], ...] = ()
    text: Mapping[str, str] = {}
    problems: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The handler's name. It is the route's label in the metrics, and its name in generated clients."""
        return getattr(self.handler, "__name__", self.path)

    @property
    def path_parameters(self) -> tuple[str, ...]:
        return tuple(name for _, name in _parameters(self.path))


class RouteMatch(msgspec.Struct, frozen=True, gc=False):
    """What the router knows of a route: `parameters` are the positions and names of the variable segments."""

    handler: Handler
    name: str
    scope: Scope
    parameters: tuple[tuple[int, str], ...]


class _Shape(msgspec.Struct, frozen=True):
    """Paths of one method and length whose literal segments have the same positions."""

    literals_of: Callable[[list[str]], Any]
    matches: dict[Any, RouteMatch]
    """By literal segments."""


class Router:
    """Finds the route of a method and a path. A literal segment goes before a parameter. HEAD is served as GET."""

    def __init__(self, routes: Iterable[Route]) -> None:
        shapes: dict[tuple[str, int], dict[tuple[int, ...], _Shape]] = {}
        for route in routes:
            segments = route.path.split("/")
            parameters = _parameters(route.path)
            variable = {position for position, _ in parameters}
            literal = tuple(position for position in range(len(segments)) if position not in variable)
            for method in ("GET", "HEAD") if route.method == "GET" else (route.method,):
                same_length = shapes.setdefault((method, len(segments)), {})
                shape = same_length.setdefault(literal, _Shape(itemgetter(*literal), {}))
                shape.matches[shape.literals_of(segments)] = RouteMatch(
                    route.handler, route.name, route.scope, parameters
                )
        self._shapes = {
            key: tuple(shape for _, shape in sorted(same_length.items(), key=lambda item: -len(item[0])))
            for key, same_length in shapes.items()
        }
        self._methods = sorted({method for method, _ in shapes})

    def find(self, method: str, path: str) -> tuple[RouteMatch, dict[str, str]] | None:
        """Returns the route and the path's parameters as text, or None."""
        segments = path.split("/")
        for shape in self._shapes.get((method, len(segments)), ()):
            match = shape.matches.get(shape.literals_of(segments))
            if match is not None:
                parameters = {name: segments[position] for position, name in match.parameters}
                return None if "" in parameters.values() else (match, parameters)
        return None

    def methods(self, path: str) -> list[str]:
        """Returns every method that the path has, none for a path of no route."""
        return [method for method in self._methods if self.find(method, path) is not None]


def _parameters(path: str) -> tuple[tuple[int, str], ...]:
    """Returns position and name of each `{name}` segment."""
    segments = enumerate(path.split("/"))
    return tuple((position, segment[1:-1]) for position, segment in segments if segment.startswith("{"))
