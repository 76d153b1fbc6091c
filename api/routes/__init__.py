"""Every call, in the order in which paths are matched: fixed words before named parts."""

from api.routes import batch, cells, conflicts, index_entries, indexes, log, ops, status, triggers

CONTRACT = (
    *cells.ROUTES,
    *batch.ROUTES,
    *log.ROUTES,
    *conflicts.ROUTES,
    *indexes.ROUTES,
    *index_entries.ROUTES,
    *triggers.ROUTES,
    *status.ROUTES,
)
OUTSIDE = ops.ROUTES
