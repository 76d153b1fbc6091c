"""Workers of billing are killed while they charge cards: nothing is charged twice, no doubt is lost (I10, I12).

Real workers and a real processor, which honours Idempotency-Keys or ignores them. One judge knows the promises only.
"""

import os
import time
import uuid
from collections import Counter

import pytest

from schemaless import Client
from schemaless.bus.topics import ensure_topics
from schemaless.stack.plan import free_ports
from tests.consumer_harness import running_consumer, write_program
from tests.faults.trigger_checker import TriggerChecker
from tests.integration.api.api_harness import api_process
from tests.log_harness import running_tailers
from tests.waiting import until

LONG = bool(os.environ.get("SCHEMALESS_FAULTS_LONG"))
pytestmark = [pytest.mark.faults, pytest.mark.timeout(7200 if LONG else 360)]

KILLS = 1_000 if LONG else 4
TRIPS_A_KILL, VERSIONS = 5, 2
CHARGE_S = 0.04
PROGRAM = """
import os, pathlib, time
from examples import billing
from examples.call_log import CallLog
from schemaless import trigger

CALLS = CallLog(pathlib.Path(os.environ["CALLS_DIR"]))

def note(what, trip):
    CALLS.add(what, str(trip.row_key), str(trip.ref_key), str(time.monotonic_ns()))

@trigger(column="BASE")
def bill_rider(trip, context):
    note("begin", trip)
    billing.bill_rider(trip, context)
    note("end", trip)
"""


def lines(folder):
    """What was noted, without lines that a kill tore."""
    found = [line for path in folder.glob("*.tsv") for line in path.read_text().splitlines(keepends=True)]
    return [line.rstrip("\n").split("\t") for line in found if line.endswith("\n")]


def bytes_in(folder):
    return sum(path.stat().st_size for path in folder.glob("*.tsv"))


@pytest.mark.parametrize("honours_keys", [True, False], ids=["honours keys", "ignores keys"])
def test_no_kill_charges_twice_or_loses_a_doubt(
    running, kafka, storage, make_datastore, tmp_path, chance, honours_keys
):
    datastore = make_datastore(shards=4, partitions=4)
    ensure_topics(kafka, datastore)
    (port,) = free_ports(1)
    charges, calls = tmp_path / "charges", tmp_path / "calls"
    processor = ["examples.card_processor", "--port", str(port), "--charges", str(charges), "--takes-s", str(CHARGE_S)]
    environment = {
        "BILLING_DIR": str(tmp_path / "bills"),
        "CALLS_DIR": str(calls),
        "CARD_PROCESSOR": f"http://127.0.0.1:{port}",
        "CARD_PROCESSOR_KEYS": "yes" if honours_keys else "no",
    }
    program = ["consumers", write_program(tmp_path, "billing_killed", PROGRAM), "--datastore", datastore.name]
    trips: list[uuid.UUID] = []
    with api_process(running.path) as api:
        hosts = f"http://127.0.0.1:{api.port}"
        # Kills from outside are no fault of the cells that they meet.
        settings = {"topology": running.path, "kafka": kafka, "hosts": hosts, "session_timeout_s": 1.0}
        settings |= {"kills_max": 1_000}
        with (
            Client([hosts], datastore=datastore.name) as client,
            running_tailers(1, running.path, kafka, datastore),
            running_consumer(processor if honours_keys else [*processor, "--ignore-keys"], {}),
            running_consumer(program, settings, environment) as worker_0,
            running_consumer(program, settings, environment) as worker_1,
        ):
            checker = TriggerChecker(storage, datastore, "billing_killed", "BASE", client, calls)

            def wait_for(holds):
                until(holds, lambda: client.program("billing_killed").status())

            for n in range(KILLS):
                new = [uuid.UUID(int=chance.getrandbits(128)) for _ in range(TRIPS_A_KILL)]
                trips += new
                for ref_key in range(1, VERSIONS + 1):
                    assert all(client.put_cells([(trip, "BASE", ref_key, {"fare": 12}) for trip in new]))
                assert all(client.put_cells([(trip, "STATUS", 1, {"is_completed": False}) for trip in new]))
                noted = bytes_in(calls)
                wait_for(lambda noted=noted: bytes_in(calls) > noted)  # a call has begun, or ended
                time.sleep(chance.uniform(0.0, 3 * CHARGE_S))
                chance.choice([worker_0, worker_1]).kill_and_restart()
                if n % 20 == 5:
                    checker.check_finished()
                if n % 20 == 19:  # else more and more cells wait: workers that are killed all the time call few
                    wait_for(checker.is_settled)
            wait_for(checker.is_settled)
            checker.check_finished()
            checker.check_order()
            parked = checker.check_status()
            checker.check_all_called(parked)
            billed = {trip for trip in trips if client.get_cell_latest(trip, "STATUS").is_completed}
            assert {worker.stop() for worker in (worker_0, worker_1)} == {0}
    charged = Counter(trip for trip, _ in lines(charges))
    doubts = {uuid.UUID(cell["row_key"]) for cell in parked if cell["error"].startswith("doubt:")}
    assert set(charged.values()) == {1}, "a card is charged twice"
    assert {str(trip) for trip in billed} <= charged.keys()
    assert doubts == set(trips) - billed, "a trip that isn't billed is a doubt, and no other one"
    assert len(parked) == len(doubts)
    if honours_keys:
        assert not doubts
        assert len(charged) == len(trips)
