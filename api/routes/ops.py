"""Outside /v1: health, readiness, metrics. For load balancers, supervisors and Prometheus."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST

from api.http.content import JSON
from api.http.request import Call
from api.http.response import Answer, good_answer
from api.http.route import Route
from schemaless.errors import NotBuilt, SchemalessError, Unavailable

NEVER_KEPT = (b"cache-control", b"no-store")


async def healthz(call: Call) -> Answer:
    """The process answers."""
    return good_answer(JSON, {"status": "alive"}, NEVER_KEPT)


async def readyz(call: Call) -> Answer:
    """The catalogue can be read from at least one cluster; 503 otherwise."""
    try:
        datastores = await call.services.catalogue.all()
    except SchemalessError as error:  # also a server whose tables aren't made yet
        raise Unavailable(str(error)) from error
    return good_answer(JSON, {"status": "ready", "datastores": sorted(datastores)}, NEVER_KEPT)


async def metrics(call: Call) -> Answer:
    """In Prometheus' text format."""
    return Answer(200, call.services.metrics.exposition(), ((b"content-type", CONTENT_TYPE_LATEST.encode()),))


async def dashboard(call: Call) -> Answer:
    """The dashboard; not built yet."""
    raise NotBuilt("the dashboard; /v1/DATASTORE/status has what it will show")


ROUTES = (
    Route("GET", "/healthz", healthz),
    Route("GET", "/readyz", readyz),
    Route("GET", "/metrics", metrics),
    Route("GET", "/ui", dashboard),
)
