"""/indexes/NAME/verify and repair: jobs of the indexers, which compare an index with its cells."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from api.http.content import decode
from api.http.parameters import Parameter, integer_schema, parse_int
from api.http.request import Request
from api.http.response import Response, ok_response
from api.http.route import Route
from api.index.checks import order_check
from api.openapi.index_views import CheckOrderedView
from api.routes.jobs import waits_for_indexer
from api.routes.status import NEVER_KEPT
from schemaless.access import Scope
from schemaless.cell import RowKey, parse_row_key
from schemaless.errors import Invalid
from schemaless.index.check import complete_definition
from schemaless.index.comparison import FIRST_ROW, LAST_ROW, CheckRequest
from schemaless.index.definition import NUMBER_MAX
from schemaless.ops.tokens import anybody
from schemaless.sharding import shard_of
from schemaless.topology import Datastore

ROW_KEYS_MAX = 100
ROWS_PER_S_MAX = 1_000_000
_PAYLOAD_BYTES_MAX = 64 << 10


class IndexCheckRequest(msgspec.Struct, forbid_unknown_fields=True, rename={"first": "from", "last": "to"}):
    """What is compared: all, some shards, the rows between two row keys, or up to 100 rows."""

    shards: list[int] | None = None
    row_keys: list[str] | None = None
    first: str | None = None
    last: str | None = None
    minions: bool = True
    rows_per_s: int | None = None

    example: ClassVar[Any] = {"shards": [12], "minions": False}

    def requests(self, datastore: Datastore, *, repairs: bool) -> dict[int, CheckRequest]:
        """Returns what is asked of each shard. Raises Invalid."""
        if self.rows_per_s is not None and not 0 <= self.rows_per_s <= ROWS_PER_S_MAX:
            raise Invalid("rows_per_s", f"is rows and entries a second up to {ROWS_PER_S_MAX}, or 0 for no bound")
        if self.row_keys is not None:
            return self._of_rows(datastore, repairs)
        shards = range(datastore.shards) if self.shards is None else sorted(set(self.shards))
        if not shards or not 0 <= shards[0] <= shards[-1] < datastore.shards:
            raise Invalid("shards", f"is a list of numbers from 0 to {datastore.shards - 1}")
        request = CheckRequest(
            repairs,
            self.minions,
            self.rows_per_s,
            FIRST_ROW if self.first is None else _row_key(self.first, "from"),
            LAST_ROW if self.last is None else _row_key(self.last, "to"),
        )
        if request.first > request.last:
            raise Invalid("from", "is above to, so it is no row")
        return dict.fromkeys(shards, request)

    def _of_rows(self, datastore: Datastore, repairs: bool) -> dict[int, CheckRequest]:
        if self.shards is not None or self.first is not None or self.last is not None:
            raise Invalid("row_keys", "can't be combined with shards, from and to")
        if not self.row_keys or len(self.row_keys) > ROW_KEYS_MAX:
            raise Invalid("row_keys", f"is a list of 1 to {ROW_KEYS_MAX} row keys")
        by_shard: dict[int, list[RowKey]] = {}
        for row_key in sorted({_row_key(text, "row_keys") for text in self.row_keys}):
            by_shard.setdefault(shard_of(row_key, datastore.shards), []).append(row_key)
        return {
            shard: CheckRequest(repairs, self.minions, self.rows_per_s, row_keys=tuple(row_keys))
            for shard, row_keys in by_shard.items()
        }


def _row_key(text: str, field: str) -> RowKey:
    try:
        return parse_row_key(text)
    except Invalid as error:
        raise Invalid(field, f"{text[:100]!r} {error.why}") from None


async def verify_index(request: Request) -> Response:
    """Orders that an index is compared with its cells. `GET /jobs/{job}` names what is missing, stale or a ghost."""
    return await _ordered(request, repairs=False)


async def repair_index(request: Request) -> Response:
    """Orders the same, and that entries on masters are brought to what the cells say."""
    return await _ordered(request, repairs=True)


async def _ordered(request: Request, *, repairs: bool) -> Response:
    datastore = await request.datastore()
    number = _VERSION.of(request.query(_VERSION))
    payload = await request.payload(_PAYLOAD_BYTES_MAX)
    asked = (
        decode(payload, request.request_format().decoder(IndexCheckRequest), "check")
        if payload
        else IndexCheckRequest()
    )
    requests = asked.requests(datastore, repairs=repairs)
    definition = await complete_definition(request.state.storage, datastore, request.path["name"], number)
    who = (request.token or anybody()).name
    job = await order_check(request.state.storage, datastore, definition, requests, who)
    document = {
        "job": f"{job:016x}",
        "matched": len(requests),
        "waits_for": await waits_for_indexer(request, datastore),
    }
    return ok_response(request.response_format(), document, NEVER_KEPT, status=202)


_VERSION: Parameter[int | None] = Parameter(
    "version",
    lambda text, field: parse_int(text, field, 1, NUMBER_MAX),
    None,
    "The number of a version that is complete. Without it: the version that answers.",
    integer_schema(1, NUMBER_MAX),
)
ROUTES = tuple(
    Route(
        "POST",
        f"/indexes/{{name}}/{word}",
        handler,
        Scope.ADMIN,
        (_VERSION,),
        payload=IndexCheckRequest,
        optional=True,
        answers={202: CheckOrderedView},
        problems=(409,),
    )
    for word, handler in (("verify", verify_index), ("repair", repair_index))
)
