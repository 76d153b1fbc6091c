"""What is outside /v1: health, readiness and metrics, for load balancers, supervisors and Prometheus."""

from __future__ import annotations

from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST

from api.http.content import JSON
from api.http.request import Request
from api.http.response import Header, Response, ok_response
from api.http.route import Route
from api.openapi.service_views import AliveView, EntranceView, ReadyView
from api.routes.status import NEVER_KEPT
from schemaless.access import Scope
from schemaless.errors import NotBuilt


def _line(document: dict[str, Any], *headers: Header) -> Response:
    """Returns a document that ends its line: people ask these calls from a shell."""
    return msgspec.structs.replace(answer := ok_response(JSON, document, *headers), body=answer.body + b"\n")


async def get_entrance(request: Request) -> Response:
    """Points the way: the documentation, the calls, and what operators ask."""
    at = request.root_path
    document = {
        "service": "schemaless",
        "docs": f"{at}/docs",
        "openapi": f"{at}/openapi.json",
        "calls": f"{at}/v1/{{datastore}}",
        **{name: f"{at}/{name}" for name in ("healthz", "readyz", "metrics")},
    }
    return _line(document)


async def healthz(request: Request) -> Response:
    """The process answers."""
    return _line({"status": "alive"}, NEVER_KEPT)


async def readyz(request: Request) -> Response:
    """200 if the catalogue can be read from at least one server, else 503. It waits for no other server.

    Its details name the buffers whose backlog doesn't shrink. The process serves all the same.
    """
    datastores = await request.state.catalogue.readable()
    document = {"status": "ready", "datastores": sorted(datastores), "backlogs": request.state.backlogs.details()}
    return _line(document, NEVER_KEPT)


async def metrics(request: Request) -> Response:
    """The process's metrics, in Prometheus' text format."""
    return Response(200, request.state.metrics.exposition(), ((b"content-type", CONTENT_TYPE_LATEST.encode()),))


async def dashboard(request: Request) -> Response:
    """The dashboard (not built yet)."""
    raise NotBuilt("the dashboard; /v1/DATASTORE/status has what it will show")


_METRICS_EXAMPLE = 'schemaless_api_requests_total{route="put_cell",status="201"} 7.0\n'

ROUTES = (
    Route("GET", "/", get_entrance, Scope.READ, answers={200: EntranceView}),
    Route("GET", "/healthz", healthz, Scope.READ, answers={200: AliveView}),
    Route("GET", "/readyz", readyz, Scope.READ, answers={200: ReadyView}),
    Route("GET", "/metrics", metrics, Scope.READ, answers={200: None}, text={"text/plain": _METRICS_EXAMPLE}),
    Route("GET", "/ui", dashboard, Scope.READ, problems=(501,)),
)
