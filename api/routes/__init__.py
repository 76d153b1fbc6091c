"""Every call, in the order in which paths are matched: fixed words before named parts."""

from api.routes import batch, cells, conflicts, entries, indexes, outside, shards, status, triggers

CONTRACT = (
    *cells.ROUTES,
    *batch.ROUTES,
    *shards.ROUTES,
    *conflicts.ROUTES,
    *indexes.ROUTES,
    *entries.ROUTES,
    *triggers.ROUTES,
    *status.ROUTES,
)
OUTSIDE = outside.ROUTES
