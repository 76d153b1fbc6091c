"""The route table: every call of the contract under /v1/{datastore}, and what operators ask outside of it."""

from msgspec.structs import replace

from api.routes import cells, erasures, index_entries, indexes, log, ops, status, topology, triggers, ui

PREFIX = "/v1/{datastore}"
_OF_A_DATASTORE = (
    *cells.ROUTES,
    *cells.BATCH_ROUTES,
    *erasures.ROUTES,
    *log.ROUTES,
    *ops.CONFLICT_ROUTES,
    *indexes.ROUTES,
    *index_entries.ROUTES,
    *indexes.CHECK_ROUTES,
    *triggers.ROUTES,
    *triggers.PARKED_ROUTES,
    *triggers.JOB_ROUTES,
    *ops.EXPLAIN_ROUTES,
    *status.ROUTES,
    *topology.ROUTES,
    *ops.TOKEN_ROUTES,
)
ROUTES = (*(replace(route, path=PREFIX + route.path) for route in _OF_A_DATASTORE), *ops.ROUTES, *ui.ROUTES)
