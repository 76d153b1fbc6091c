"""A worker is asked to stop while MySQL is away: it says how many finished cells will be called again (I9, I10)."""

import os
import re
import signal
import subprocess

import pytest

from schemaless.bus.topics import ensure_topics
from tests.consumer_harness import ConsumerProcess, wait_until_finished, write_program
from tests.log_harness import new_cell, put, running_tailers
from tests.waiting import until

pytestmark = [pytest.mark.storage, pytest.mark.faults]

CELLS = 12
SIGNALS = [signal.SIGKILL, signal.SIGSTOP] if os.environ.get("SCHEMALESS_FAULTS_LONG") else [signal.SIGKILL]
PROGRAM = """
import pathlib, time
from schemaless import trigger

HERE = pathlib.Path(__file__).parent
CALLS = (HERE / "calls").open("a", buffering=1)

@trigger(column="BASE")
def note(cell):
    CALLS.write(f"{cell.location}\\n")
    while cell.body["n"] == 0 and not (HERE / "go").exists():
        time.sleep(0.01)
"""


@pytest.mark.parametrize("number", SIGNALS)
def test_what_will_be_called_again_is_said(running, kafka, storage, make_datastore, tmp_path, number):
    """Whether the server refuses connections or hangs. The next worker calls these cells again.

    A server that hung may still run the statement that it was sent.
    """
    datastore = make_datastore(shards=2, partitions=1, placement=("a",))
    ensure_topics(kafka, datastore)
    program = write_program(tmp_path, "notes", PROGRAM)
    settings = {"topology": running.path, "kafka": kafka, "transport": "plain"}
    arguments = ["consumers", program, "--datastore", datastore.name]
    server = running.servers["a1"]

    def called():
        return (tmp_path / "calls").read_text().splitlines() if (tmp_path / "calls").exists() else []

    with running_tailers(1, running.path, kafka, datastore):
        worker = ConsumerProcess(arguments, settings, {}, stdout=subprocess.PIPE)
        try:
            put(storage, datastore, [new_cell(datastore, {"n": n}, shard=0) for n in range(CELLS)])
            until(lambda: len(called()) == 1)  # it waits in the first call, and the others are read
            server.kill() if number is signal.SIGKILL else server.stop()
            try:
                (tmp_path / "go").touch()
                until(lambda: len(called()) == CELLS)
                assert worker.stop(timeout_s=40.0) == 0
            finally:
                server.start() if number is signal.SIGKILL else server.cont()
            log = worker.process.stdout.read()
            said = re.findall(rb"finished cells may come again.*cells=\D*(\d+)", log)
        finally:
            worker.process.kill()
            worker.process.stdout.close()
        assert said == [b"%d" % CELLS], log.decode()
        worker = ConsumerProcess(arguments, settings, {})
        try:
            wait_until_finished(storage, datastore, "trigger:notes")
        finally:
            worker.stop()
    assert len(called()) == 2 * CELLS or (number is signal.SIGSTOP and len(called()) == CELLS)
