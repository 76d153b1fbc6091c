"""/triggers/PROGRAM/parked: the cells that a program set aside, and orders for them."""

from __future__ import annotations

import base64
from typing import Any, ClassVar

import msgspec

from api.http.cell_json import views_within
from api.http.content import decode
from api.http.parameters import FLAG, LIMIT, READ_FROM, Parameter, parse_flag
from api.http.request import Request
from api.http.response import Response, ok_response
from api.http.route import Route
from api.openapi.program_views import OrderedView, ParkedPageView
from api.read.reader import served_together
from api.routes.status import NEVER_KEPT
from api.routes.triggers import PAYLOAD_BYTES_MAX, REASON_CHARACTERS_MAX
from api.status.workers import read_workers
from api.triggers.control import TriggerControl
from api.triggers.parked_orders import IDS_MAX, ParkedOrders
from api.triggers.parked_pages import BEFORE_ALL, BEHIND, PAGE_BYTES_MAX, ParkedCursor, ParkedPages
from schemaless.access import Scope
from schemaless.cell import parse_column_name, parse_row_key, parse_time
from schemaless.errors import Invalid
from schemaless.location import INT64_MAX
from schemaless.ops.tokens import anybody
from schemaless.quantity import quantity
from schemaless.storage.parked_selection import ParkedFilter
from schemaless.storage.parked_table import Cause, Order
from schemaless.storage.trigger_order_table import latest
from schemaless.topology import Datastore

RATE_MAX = 1_000_000
_TEXTS = ("trigger", "column", "row_key", "cause", "since")
_CAUSES = (*(cause.value for cause in Cause), BEHIND)


class ParkedChoice(msgspec.Struct, forbid_unknown_fields=True):
    """Which parked cells: those that have everything that is given."""

    trigger: str | None = None
    column: str | None = None
    row_key: str | None = None
    cause: str | None = None
    since: str | None = None
    doubt: bool = False

    def parsed(self) -> ParkedFilter:
        """Raises Invalid. A cause `behind` is none of a record: then records are meant that hold their rows."""
        cause = None if self.cause is None else _parse_cause(self.cause, "cause")
        return ParkedFilter(
            _parse_trigger(self.trigger, "trigger") if self.trigger is not None else None,
            parse_column_name(self.column, "column") if self.column is not None else None,
            parse_row_key(self.row_key) if self.row_key is not None else None,
            None if cause in (None, BEHIND) else Cause(cause),
            parse_time(self.since, "since") if self.since is not None else None,
            only_held=cause == BEHIND,
            only_doubts=self.doubt,
        )


class ParkedRequest(msgspec.Struct, forbid_unknown_fields=True):
    """An order for the cells of `filter`, or of `ids`. `rate` is in cells a second. A discard needs a reason."""

    filter: ParkedChoice | None = None
    ids: list[str] | None = None
    dry_run: bool = False
    rate: float | None = None
    reason: str | None = None

    example: ClassVar[Any] = {"filter": {"cause": "error"}, "rate": 10, "dry_run": True}


async def list_parked(request: Request) -> Response:
    """Parked cells by shard and added_id, each followed by what waits behind it in its row. `count` counts the parked
    ones alone.
    """
    datastore = await request.datastore()
    query = request.query(*_PARAMETERS)
    limit, after, cause = LIMIT.of(query), CURSOR.of(query), query.get("cause")
    filters: dict[str, Any] = {name: query[name] for name in _TEXTS if name in query}
    wanted = ParkedChoice(**filters, doubt=DOUBT.of(query)).parsed()
    control = TriggerControl(request.state.storage, datastore, request.path["program"])
    pages = ParkedPages(request.state.reader, datastore, control.consumer, READ_FROM.of(query))
    await request.read.reserve(PAGE_BYTES_MAX)
    behind = cause in (None, BEHIND) and not wanted.only_doubts
    page = await pages.read(wanted, after, limit, heads=cause != BEHIND, behind=behind)
    if not page.count and after == BEFORE_ALL:
        await control.require_known()
    form = request.response_format()
    bytes_max = request.state.settings.response_bytes_max
    views = await views_within(page.views, lambda one: one[1], form, bytes_max, request.read)
    following = page.following if len(views) == len(page.views) else page.views[len(views) - 1][0].cursor
    document = {
        "parked": views,
        "cursor": None if following is None else _cursor_text(following),
        "count": page.count,
    }
    return ok_response(form, document, *served_together(page.served).headers)


async def retry_parked(request: Request) -> Response:
    """Orders that parked cells are called again, each row in its order. A retry that fails parks the cell again."""
    return await _ordered(request, Order.RETRY)


async def discard_parked(request: Request) -> Response:
    """Orders that parked cells are never called. What waits behind them is called, in order."""
    return await _ordered(request, Order.DISCARD)


async def _ordered(request: Request, order: Order) -> Response:
    datastore = await request.datastore()
    request.query()
    asked = decode(await request.payload(PAYLOAD_BYTES_MAX), request.request_format().decoder(ParkedRequest), "order")
    _verify(asked, order)
    control = TriggerControl(request.state.storage, datastore, request.path["program"])
    orders = ParkedOrders(request.state.storage, datastore, control, (request.token or anybody()).name)
    if asked.ids is not None:
        done = await orders.by_ids(order, asked.ids, asked.rate, asked.reason, dry_run=asked.dry_run)
    else:
        wanted = (asked.filter or ParkedChoice()).parsed()
        done = await orders.by_filter(order, wanted, asked.rate, asked.reason, dry_run=asked.dry_run)
    document = {
        "matched": done.matched,
        "job": None if done.job is None else f"{done.job:016x}",
        "dry_run": asked.dry_run,
        "more": done.more,
        "left_out": [msgspec.structs.asdict(one) for one in done.left_out],
        "waits_for": await waits_for(request, datastore, control),
    }
    return ok_response(request.response_format(), document, NEVER_KEPT)


def _verify(asked: ParkedRequest, order: Order) -> None:
    if (asked.filter is None) == (asked.ids is None):
        raise Invalid("order", "needs a filter, which may be empty, or ids, and not both")
    if asked.ids is not None and not 1 <= len(asked.ids) <= IDS_MAX:
        raise Invalid("ids", f"has 1 to {IDS_MAX} ids")
    if asked.filter is not None and asked.filter.cause == BEHIND:
        raise Invalid("filter.cause", "what waits behind a parked cell can't be ordered: choose the parked cells")
    if asked.rate is not None and not 0.001 <= asked.rate <= RATE_MAX:
        raise Invalid("rate", f"is cells a second, from 0.001 to {RATE_MAX}")
    if asked.reason is not None and len(asked.reason) > REASON_CHARACTERS_MAX:
        raise Invalid("reason", f"has at most {REASON_CHARACTERS_MAX} characters")
    if order is Order.DISCARD and not (asked.reason or "").strip():
        raise Invalid("reason", "a discard needs a reason: those cells are never called")


async def waits_for(request: Request, datastore: Datastore, control: TriggerControl) -> str | None:
    """Returns why an order isn't carried out now, or None."""
    workers = await read_workers(request.state.storage, datastore, request.state.settings.status_timeout_s)
    own = [row for row in workers if row.consumer == control.consumer]
    if not own:
        return "nobody runs it: start a worker of the program"
    program = latest((await control.orders()).values())
    if program.paused:
        return f"the program is paused: {program.reason or 'no reason was given'}. Resume it"
    if tripped := [row.report.tripped for row in own if row.report.tripped is not None]:
        return f"the breaker of {len(tripped)} of {quantity(len(own), 'worker')} is open: {tripped[0]}"
    return None


def _parse_trigger(text: str, field: str) -> str:
    if not 1 <= len(text) <= 100:
        raise Invalid(field, "is the name of a function")
    return text


def _parse_cause(text: str, field: str) -> str:
    if text not in _CAUSES:
        raise Invalid(field, f"is one of {', '.join(_CAUSES)}")
    return text


def _cursor_text(cursor: ParkedCursor) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode(cursor)).decode().rstrip("=")


def _parse_cursor(text: str, field: str) -> ParkedCursor:
    try:
        data = base64.b64decode(text[:200] + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        cursor = msgspec.json.decode(data, type=ParkedCursor)
        if min(cursor.shard, cursor.head, cursor.after) < 0 or max(cursor.shard, cursor.head, cursor.after) > INT64_MAX:
            raise ValueError
    except (ValueError, msgspec.MsgspecError):
        raise Invalid(field, "is not a cursor of this API") from None
    return cursor


def _text(text: str, field: str) -> str:
    return text


TRIGGER: Parameter[str] = Parameter("trigger", _parse_trigger, "", "The function that failed.")
COLUMN: Parameter[str] = Parameter("column", _text, "", "The column of the parked cell.")
ROW_KEY: Parameter[str] = Parameter("row_key", _text, "", "The row.")
CAUSE: Parameter[str] = Parameter(
    "cause", _parse_cause, "", ", ".join(_CAUSES) + ".", {"type": "string", "enum": [*_CAUSES]}
)
SINCE: Parameter[str] = Parameter("since", _text, "", "Parked at that time or later, RFC 3339.")
CURSOR: Parameter[ParkedCursor] = Parameter(
    "cursor", _parse_cursor, BEFORE_ALL, "Of the page before: where this one begins."
)
DOUBT: Parameter[bool] = Parameter("doubt", parse_flag, False, "Only effects that may have happened or not.", FLAG)
_PARAMETERS = (TRIGGER, COLUMN, ROW_KEY, CAUSE, SINCE, DOUBT, LIMIT, CURSOR, READ_FROM)
ROUTES = (
    Route("GET", "/triggers/{program}/parked", list_parked, Scope.READ, _PARAMETERS, answers={200: ParkedPageView}),
    Route(
        "POST",
        "/triggers/{program}/parked/retry",
        retry_parked,
        Scope.ADMIN,
        payload=ParkedRequest,
        answers={200: OrderedView},
    ),
    Route(
        "POST",
        "/triggers/{program}/parked/discard",
        discard_parked,
        Scope.ADMIN,
        payload=ParkedRequest,
        answers={200: OrderedView},
    ),
)
