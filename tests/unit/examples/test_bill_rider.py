"""examples/bill_rider.py in memory: the trigger of the source texts, with the kit's client in place of its own."""

import importlib
import uuid

import pytest

TRIP = uuid.UUID("6ba7b810-9dad-11d1-80b4-00c04fd430c8")


@pytest.fixture
def program(monkeypatch):
    monkeypatch.setenv("SCHEMALESS_HOSTS", "http://nobody")
    return importlib.import_module("examples.bill_rider")


def test_it_bills_after_a_refusal_and_not_again(trigger_kit, monkeypatch, program):
    results, charged = ["TRY AGAIN", "SUCCESS"], []

    def processor(trip_info):
        charged.append(trip_info.fare)
        return results.pop(0)

    kit = trigger_kit(program)
    monkeypatch.setattr(program, "schemaless_client", kit.client)
    monkeypatch.setattr(program, "call_to_credit_card_processor_for_billing_trip", processor)
    kit.put(TRIP, "BASE", {"fare": 12.5})
    kit.advance(5)
    kit.redeliver()
    assert [type(call.error) for call in kit.calls] == [program.CouldNotBillRider, type(None), type(None)]
    assert charged == [12.5, 12.5]
    status = kit.client.get_cell_latest(TRIP, "STATUS")
    assert (status.ref_key, status.is_completed, status.result) == (1, True, "SUCCESS")
