"""The route table: every call of the contract under /v1/{datastore}, and what operators ask outside of it."""

from msgspec.structs import replace

from api.routes import (
    batch,
    cells,
    conflicts,
    explain,
    index_checks,
    index_entries,
    indexes,
    jobs,
    log,
    ops,
    parked,
    status,
    tokens,
    triggers,
)

PREFIX = "/v1/{datastore}"
_OF_A_DATASTORE = (
    *cells.ROUTES,
    *batch.ROUTES,
    *log.ROUTES,
    *conflicts.ROUTES,
    *indexes.ROUTES,
    *index_entries.ROUTES,
    *index_checks.ROUTES,
    *triggers.ROUTES,
    *parked.ROUTES,
    *jobs.ROUTES,
    *explain.ROUTES,
    *status.ROUTES,
    *tokens.ROUTES,
)
ROUTES = (*(replace(route, path=PREFIX + route.path) for route in _OF_A_DATASTORE), *ops.ROUTES)
