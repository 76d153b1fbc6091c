"""A trigger program that Kafka doesn't answer, while MySQL does: it calls nothing after its session time-out (I10).

The group may have given its shards to another worker by then. What waits is called when Kafka answers again.
"""

import time

import pytest

from schemaless.bus.topics import ensure_topics
from schemaless.config import TransportKind
from schemaless.stack.local import running_kafka
from tests.consumer_harness import running_consumer, wait_until_finished, write_program
from tests.log_harness import new_cell, put, running_tailers

pytestmark = pytest.mark.faults

SESSION_TIMEOUT_S = 3.0
PROGRAM = """
import pathlib, time
from schemaless import trigger

CALLS = (pathlib.Path(__file__).parent / "calls").open("a", buffering=1)

@trigger(column="BASE")
def note(cell):
    CALLS.write(f"{cell.body['n']} {time.monotonic()}\\n")
"""


@pytest.fixture
def broker(tmp_path_factory):
    """A broker for each test, because it is stopped for a while, and its controller forgets it then."""
    with running_kafka(tmp_path_factory.mktemp("kafka")) as found:
        yield found


@pytest.mark.parametrize("transport", list(TransportKind))
def test_nothing_is_called_while_the_group_may_have_given_the_shards_away(
    running, broker, storage, make_datastore, tmp_path, transport
):
    """Cells are read from MySQL meanwhile, because the heads moved. They wait for the group."""
    kafka, server = broker
    datastore = make_datastore(shards=4, partitions=2)
    ensure_topics(kafka, datastore)
    program = ["consumers", write_program(tmp_path, "notes", PROGRAM), "--datastore", datastore.name]
    settings = {"topology": running.path, "kafka": kafka, "transport": transport.value}
    settings["session_timeout_s"] = SESSION_TIMEOUT_S

    def put_cells(first, count):
        put(storage, datastore, [new_cell(datastore, {"n": n}) for n in range(first, first + count)])

    with running_tailers(1, running.path, kafka, datastore), running_consumer(program, settings) as worker:
        put_cells(0, 20)
        wait_until_finished(storage, datastore, "trigger:notes")
        server.stop()
        try:
            time.sleep(SESSION_TIMEOUT_S + 2.0)
            put_cells(20, 20)
            time.sleep(4.0)  # the heads are looked at every second
        finally:
            answered_at = time.monotonic()
            server.cont()
        wait_until_finished(storage, datastore, "trigger:notes")
        assert worker.process.poll() is None
    called = dict(line.split() for line in (tmp_path / "calls").read_text().splitlines())
    assert {int(n) for n in called} == set(range(40))
    assert min(float(at) for n, at in called.items() if int(n) >= 20) > answered_at
