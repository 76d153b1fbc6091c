"""billing: charges the customer of every finished trip of one carrier, and writes the result beside it.

The source texts' `bill_rider`: reads STATUS and BASE, calls a card processor, raises when that fails so that it is
called again later, and writes the next STATUS. It may be called more than once for a trip: one that is billed already
is left alone. The charge is made once, because it is an effect of the context. The bill is put once, because its put
has an Idempotency-Key.

    BILLING_CARRIER      only flights of this carrier; default: all
    CARD_PROCESSOR       where examples/card_processor.py listens
    CARD_PROCESSOR_KEYS  "no" for a processor that ignores Idempotency-Key: doubtful charges are then parked for people
    BILLING_DIR          folder for the bills that were acknowledged: `row key, ref_key` with a tab between
"""

from __future__ import annotations

import os
from functools import cache, partial
from pathlib import Path

import httpx

from examples.call_log import CallLog
from schemaless import Context, DidNotHappen, Retry, TriggerCell, trigger

SUCCESS = "SUCCESS"
STATUS_PAUSE_S = 0.5
PROCESSOR_TIMEOUT_S = 5.0
CARRIER = os.environ.get("BILLING_CARRIER")
PROCESSOR = os.environ.get("CARD_PROCESSOR", "http://127.0.0.1:8200")
HONOURS_KEYS = os.environ.get("CARD_PROCESSOR_KEYS", "yes") != "no"

_bills = CallLog(Path(os.environ.get("BILLING_DIR", "bills")))


class CouldNotBillRider(DidNotHappen):
    """Raised to be called again later. The card wasn't charged."""


@trigger(column="BASE")
def bill_rider(trip: TriggerCell, context: Context) -> None:
    if CARRIER is not None and trip.body.get("carrier") != CARRIER:
        return
    client = context.client
    status = client.get_cell_latest(trip.row_key, "STATUS")
    if not status:
        raise Retry(STATUS_PAUSE_S)  # the trip has no end yet
    if not status.is_completed:
        charge = partial(_charge, trip, context.idempotency_key("charge"))
        result = context.once("charge", charge, resolve=charge if HONOURS_KEYS else None)
        body = {**status.body, "is_completed": True, "result": result}
        bill = client.put(trip.row_key, "STATUS", body, idempotency_key=f"bill {trip.row_key}")
        _bills.add(str(trip.row_key), str(bill.ref_key))
    else:  # billed already, by a call whose note of it may have been lost
        _bills.add(str(trip.row_key), str(status.ref_key))


def _charge(trip: TriggerCell, key: str) -> str:
    """Returns SUCCESS. Raises CouldNotBillRider when the card wasn't charged, and other errors when nobody knows."""
    try:
        answer = _processor().post(f"/charges/{trip.row_key}", headers={"idempotency-key": key})
    except httpx.ConnectError as error:
        raise CouldNotBillRider(repr(error)) from error
    result = str(answer.json()["result"])
    if result != SUCCESS:
        raise CouldNotBillRider(result)
    return result


@cache
def _processor() -> httpx.Client:
    return httpx.Client(base_url=PROCESSOR, timeout=PROCESSOR_TIMEOUT_S, trust_env=False)
