"""Every call, in the order in which paths are matched: fixed words before named parts."""

from api.routes import batch, cells, outside, shards

CONTRACT = (*cells.ROUTES, *batch.ROUTES, *shards.ROUTES)
OUTSIDE = outside.ROUTES
