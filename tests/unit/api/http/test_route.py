"""The router: literal segments before parameters, every method of a path, and no path with an empty segment."""

import pytest

from api.http.asgi import Route, Router
from api.routes import ROUTES
from schemaless.access import Scope


async def _never(request):
    raise AssertionError("the router calls no handler")


ROUTER = Router(
    [
        Route("GET", "/v1/{datastore}/cells/{row_key}/{column}/versions", _never, Scope.READ),
        Route("GET", "/v1/{datastore}/cells/{row_key}/{column}/{ref_key}", _never, Scope.READ),
        Route("PUT", "/v1/{datastore}/cells/{row_key}/{column}/{ref_key}", _never, Scope.READ),
        Route("POST", "/v1/{datastore}/shards/cells", _never, Scope.READ),
        Route("GET", "/healthz", _never, Scope.READ),
    ]
)


@pytest.mark.parametrize(
    ("method", "path", "parameters"),
    [
        ("PUT", "/v1/trips/cells/R/B/1", {"datastore": "trips", "row_key": "R", "column": "B", "ref_key": "1"}),
        ("HEAD", "/v1/trips/cells/R/B/1", {"datastore": "trips", "row_key": "R", "column": "B", "ref_key": "1"}),
        ("GET", "/v1/trips/cells/R/B/versions", {"datastore": "trips", "row_key": "R", "column": "B"}),
        ("GET", "/healthz", {}),
    ],
)
def test_a_path_is_found_with_its_parameters(method, path, parameters):
    """A literal segment wins over a parameter, and HEAD is served as GET."""
    _, found = ROUTER.find(method, path)
    assert found == parameters


def test_a_method_that_the_literal_path_lacks_is_found_at_the_parameter():
    """PUT …/versions is a put with a ref_key that is no number."""
    _, found = ROUTER.find("PUT", "/v1/trips/cells/R/B/versions")
    assert found["ref_key"] == "versions"


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "",
        "*",
        "/v1",
        "/v2/trips/cells/R/B/1",
        "/v1//cells/R/B/1",
        "/v1/trips/cells/R/B/",
        "/healthz/",
        "x/healthz",
    ],
)
def test_any_other_path_has_no_route(path):
    """Neither a handler nor a method."""
    assert ROUTER.find("GET", path) is None
    assert ROUTER.methods(path) == []


def test_the_methods_of_a_path_are_those_of_all_its_routes():
    """Those at the literal segment and those at the parameter together."""
    assert ROUTER.methods("/v1/trips/cells/R/B/1") == ["GET", "HEAD", "PUT"]
    assert ROUTER.methods("/v1/trips/cells/R/B/versions") == ["GET", "HEAD", "PUT"]
    assert ROUTER.methods("/v1/trips/shards/cells") == ["POST"]


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
def test_the_router_finds_each_route_of_the_table(route):
    """No route hides another one."""
    path = "/".join("x" if part.startswith("{") else part for part in route.path.split("/"))
    match, _ = Router(ROUTES).find(route.method, path)
    assert match.handler is route.handler
