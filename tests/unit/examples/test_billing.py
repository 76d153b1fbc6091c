"""examples/billing.py in memory: charged once, wherever the worker is killed, and every doubt is on the list."""

import itertools
import uuid

import httpx
import pytest

from examples import billing
from examples.call_log import CallLog

TRIP = uuid.UUID("6ba7b810-9dad-11d1-80b4-00c04fd430c8")
LATER_S = 60.0


class Processor:
    """A card processor. `refusals` of the next charges are answered with TRY AGAIN. `charging` is called after one."""

    def __init__(self, *, honours_keys=True):
        self.honours_keys = honours_keys
        self.charged = []
        self.keys = set()
        self.refusals = 0
        self.charging = lambda: None

    def __call__(self, request):
        trip, key = request.url.path.rpartition("/")[2], request.headers["idempotency-key"]
        if self.refusals:
            self.refusals -= 1
            return httpx.Response(503, json={"result": "TRY AGAIN"})
        if not (self.honours_keys and key in self.keys):
            self.charged.append(trip)
            self.keys.add(key)
        self.charging()
        return httpx.Response(200, json={"result": "SUCCESS"})


@pytest.fixture(params=[True, False], ids=["honours keys", "ignores keys"])
def processor(request, monkeypatch, tmp_path):
    made = Processor(honours_keys=request.param)
    client = httpx.Client(base_url="http://processor", transport=httpx.MockTransport(made))
    monkeypatch.setattr(billing, "_processor", lambda: client)
    monkeypatch.setattr(billing, "HONOURS_KEYS", made.honours_keys)
    monkeypatch.setattr(billing, "_bills", CallLog(tmp_path))
    return made


def ended_trip(kit):
    kit.put(TRIP, "BASE", {"carrier": "HA"})
    kit.put(TRIP, "STATUS", {"is_completed": False})


def status(kit):
    return kit.client.get_cell_latest(TRIP, "STATUS")


def test_a_trip_is_billed_once_however_often_it_is_delivered(trigger_kit, processor):
    kit = trigger_kit(billing)
    ended_trip(kit)
    kit.deliver()
    kit.redeliver()
    kit.redeliver()
    assert (processor.charged, status(kit).result, status(kit).ref_key) == ([str(TRIP)], "SUCCESS", 2)


def test_a_trip_waits_for_its_end(trigger_kit, processor):
    """That is no failed call."""
    kit = trigger_kit(billing, attempts_max=1)
    kit.put(TRIP, "BASE", {"carrier": "HA"})
    kit.advance(10)
    assert [cell.cause for cell in kit.waiting()] == ["waiting"]
    kit.put(TRIP, "STATUS", {"is_completed": False})
    kit.advance(1)
    assert (kit.waiting(), status(kit).is_completed) == ([], True)


def test_a_charge_that_is_refused_is_tried_again(trigger_kit, processor):
    kit = trigger_kit(billing)
    processor.refusals = 3
    ended_trip(kit)
    kit.deliver()
    assert kit.waiting()
    kit.advance(LATER_S)
    assert [type(call.error) for call in kit.calls] == [billing.CouldNotBillRider] * 3 + [type(None)]
    assert processor.charged == [str(TRIP)]


def test_a_card_that_is_always_refused_is_parked_and_replayed(trigger_kit, processor):
    """Other trips are billed meanwhile."""
    kit = trigger_kit(billing, attempts_max=3)
    processor.refusals = 3
    ended_trip(kit)
    kit.advance(LATER_S)
    (parked,) = kit.parked()
    assert (parked.row_key, parked.cause, parked.attempts) == (TRIP, "error", 3)
    assert "CouldNotBillRider: TRY AGAIN" in parked.error
    other = uuid.uuid4()
    kit.put(other, "BASE", {"carrier": "HA"})
    kit.put(other, "STATUS", {"is_completed": False})
    kit.deliver()
    assert processor.charged == [str(other)]
    kit.retry()
    kit.deliver()
    assert (kit.parked(), processor.charged) == ([], [str(other), str(TRIP)])


def test_a_kill_at_any_point_charges_once_or_is_a_doubt_on_the_list(trigger_kit, processor):
    """The trip ends billed, unless the processor ignores keys and the worker was killed with an open intent."""
    doubts = 0
    for point in itertools.count():
        processor.charged.clear()
        processor.keys.clear()
        kit = trigger_kit(billing)
        ended_trip(kit)
        kit.kill_at(point)
        kit.deliver()
        if not kit.kills:
            break
        kit.advance(LATER_S)
        assert len(processor.charged) <= 1, kit.points
        if parked := kit.parked():
            assert not processor.honours_keys
            assert (parked[0].cause, parked[0].error.partition(":")[0]) == ("verdict", "doubt")
            doubts += 1
        else:
            assert (processor.charged, status(kit).is_completed) == ([str(TRIP)], True)
    assert point > 10
    assert bool(doubts) is not processor.honours_keys


def test_a_kill_while_the_card_is_charged_is_settled_by_a_person(trigger_kit, processor):
    """Where the processor ignores keys, somebody asks it, and notes what it said."""
    kit = trigger_kit(billing)
    ended_trip(kit)
    processor.charging = kit.kill
    kit.deliver()
    processor.charging = lambda: None
    kit.advance(LATER_S)
    if not processor.honours_keys:
        (doubt,) = kit.parked()
        column, ref_key = doubt.error.split(" as ")[1].split(" of the row")[0].split()
        kit.put(TRIP, column, {"state": "happened", "result": "SUCCESS"}, int(ref_key))
        kit.retry()
        kit.deliver()
    assert (kit.kills, processor.charged, status(kit).result) == (1, [str(TRIP)], "SUCCESS")
