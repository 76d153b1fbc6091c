"""billing: charges the customer of every finished trip of one carrier, and writes the result beside it.

The source texts' `bill_rider`: reads STATUS and BASE, calls a card processor, raises when that fails so that it is
called again later, and writes the next STATUS. It may be called more than once for a trip: one that is billed already
is left alone. The charge is made once, because it is an effect of the context. The bill is put once, because its put
has an Idempotency-Key. A trip whose card is blocked is parked, until somebody has called the customer.

    BILLING_CARRIER      only flights of this carrier. Default: all
    CARD_PROCESSOR       where examples/card_processor.py listens
    CARD_PROCESSOR_KEYS  "no" for a processor that ignores Idempotency-Key: doubtful charges are then parked for people
    BILLING_DIR          folder for the bills that were acknowledged: `row key, ref_key` with a tab between
"""

from __future__ import annotations

import json
import os
from functools import cache, partial
from http import HTTPStatus
from pathlib import Path

import httpx

from examples.call_log import CallLog
from schemaless import Context, DidNotHappen, Park, Retry, TriggerCell, trigger

SUCCESS = "SUCCESS"
STATUS_PAUSE_S = 0.5
PROCESSOR_TIMEOUT_S = 5.0
CARRIER = os.environ.get("BILLING_CARRIER")
PROCESSOR = os.environ.get("CARD_PROCESSOR", "http://127.0.0.1:8200")
HONOURS_KEYS = os.environ.get("CARD_PROCESSOR_KEYS", "yes") != "no"

_bills = CallLog(Path(os.environ.get("BILLING_DIR", "bills")))


class CouldNotBillRider(DidNotHappen):
    """Raised to be called again later. The card wasn't charged."""


class CardBlocked(DidNotHappen):
    """Raised when another attempt is of no use. The card wasn't charged."""


@trigger(column="BASE", where=None if CARRIER is None else f"carrier == {json.dumps(CARRIER)}")
def bill_rider(trip: TriggerCell, context: Context) -> None:
    client = context.client
    status = client.get_cell_latest(trip.row_key, "STATUS")
    if not status:
        raise Retry(STATUS_PAUSE_S)  # the trip has no end yet
    if not status.is_completed:
        charge = partial(_charge, trip, context.idempotency_key("charge"))
        try:
            result = context.once("charge", charge, resolve=charge if HONOURS_KEYS else None)
        except CardBlocked as error:
            raise Park(str(error)) from error
        body = {**status.body, "is_completed": True, "result": result}
        bill = client.put(trip.row_key, "STATUS", body, idempotency_key=f"bill {trip.row_key}")
        _bills.add(str(trip.row_key), str(bill.ref_key))
    else:  # billed already, by a call whose note of it may have been lost
        _bills.add(str(trip.row_key), str(status.ref_key))


def _charge(trip: TriggerCell, key: str) -> str:
    """Returns SUCCESS. Raises CouldNotBillRider or CardBlocked when the card wasn't charged, else nobody knows."""
    try:
        answer = _processor().post(f"/charges/{trip.row_key}", headers={"idempotency-key": key})
    except httpx.ConnectError as error:
        raise CouldNotBillRider(repr(error)) from error
    result = str(answer.json()["result"])
    if answer.status_code == HTTPStatus.PAYMENT_REQUIRED:
        raise CardBlocked(result)
    if result != SUCCESS:
        raise CouldNotBillRider(result)
    return result


@cache
def _processor() -> httpx.Client:
    return httpx.Client(base_url=PROCESSOR, timeout=PROCESSOR_TIMEOUT_S, trust_env=False)
