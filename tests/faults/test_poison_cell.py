"""A cell whose call ends its process, blocks or holds it, takes its memory or never returns is parked. Others go on.

That holds I10, I12 and I14. Real workers, which are started again as their supervisor would. Some are killed from
outside meanwhile.
"""

import os

import pytest

from schemaless.bus.topics import ensure_topics
from schemaless.config import TransportKind
from schemaless.storage import checkpoint_table, parked_table, worker_table
from schemaless.storage.checkpoint_table import State
from schemaless.storage.operation import query
from schemaless.storage.parked_table import Cause
from tests.consumer_harness import heads, reached, running_consumer, write_program
from tests.log_harness import new_cell, put, running_tailers
from tests.waiting import until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

SHARDS, POISONED, BEFORE = 4, 1, 20
KILLS_MAX = 2
ENDS = [("kill", TransportKind.FAUST, Cause.KILLED)]
if os.environ.get("SCHEMALESS_FAULTS_LONG"):
    ENDS += [
        ("hang", TransportKind.PLAIN, Cause.HUNG),
        ("exit", TransportKind.PLAIN, Cause.KILLED),
        ("block", TransportKind.FAUST, Cause.KILLED),
        ("block", TransportKind.PLAIN, Cause.KILLED),
        ("hold", TransportKind.FAUST, Cause.KILLED),
        ("hold", TransportKind.PLAIN, Cause.KILLED),
        ("leak", TransportKind.FAUST, Cause.ERROR),
        ("raise", TransportKind.PLAIN, Cause.ERROR),
    ]
PROGRAM = """
import asyncio, os, pathlib, re, resource, signal, sys, time
from schemaless import RetryPolicy, trigger

HERE = pathlib.Path(__file__).parent
CALLS = os.open(HERE / "calls", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
class Odd(BaseException):
    pass

def end(how):
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit":
        sys.exit(3)
    if how == "raise":
        raise Odd
    if how == "leak":
        fill_memory()
    if how == "hold":
        re.match(r"(a+)+$", "a" * 60 + "b")
    time.sleep(3600)

def fill_memory():
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 29), hard))
    try:
        held = [bytearray(1 << 26) for _ in range(100)]
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))

def work(cell):
    os.write(CALLS, f"{cell.location}\\n".encode())
    if cell.body.get("ends") and not (HERE / "repaired").exists():
        end(cell.body["ends"])

@trigger(column="BASE", retry=RetryPolicy(attempts=2, delay=0.1))
"""
SYNC = """
def call(cell):
    time.sleep(0.01)
    work(cell)
"""
ASYNC = """
async def call(cell):
    await asyncio.sleep(0.01)
    work(cell)
"""


def rows(storage, datastore, consumer):
    return {
        row.shard: row
        for cluster in datastore.clusters
        for row in storage.master(cluster).run(checkpoint_table.of_consumer, datastore.name, consumer)
    }


def called(folder):
    return (folder / "calls").read_text().count("\n") if (folder / "calls").exists() else 0


@pytest.mark.parametrize("case", ENDS, ids=lambda case: f"{case[0]} {case[1].value}")
def test_a_cell_that_ends_its_process_is_parked_and_its_shard_goes_on(
    running, kafka, storage, make_datastore, tmp_path, case
):
    ends, transport, cause = case
    datastore = make_datastore(shards=SHARDS, partitions=2)
    ensure_topics(kafka, datastore)
    consumer = f"trigger:poison_{ends}"
    text = PROGRAM + (ASYNC if ends == "block" else SYNC)
    program = ["consumers", write_program(tmp_path, f"poison_{ends}", text), "--datastore", datastore.name]
    settings = {"topology": running.path, "kafka": kafka, "transport": transport.value, "session_timeout_s": 1.5}
    settings |= {"kills_max": KILLS_MAX, "call_limit_s": 2.0 if ends != "hold" else 600.0}
    if ends in ("hang", "block", "hold"):  # the others' processes must not end by a start that takes long
        settings["hang_limit_s"] = 6.0

    def put_cells(count, **body):
        for shard in range(SHARDS):
            put(storage, datastore, [new_cell(datastore, {"n": n, **body}, shard=shard) for n in range(count)])

    put_cells(BEFORE)
    with running_tailers(1, running.path, kafka, datastore), running_consumer(program, settings) as worker:
        ended = 0

        def wait_for(holds):
            """Starts the worker again when it has ended."""

            def running():
                nonlocal ended
                if not (held := holds()) and worker.process.poll() is not None:
                    ended += 1
                    worker.kill_and_restart()
                return held

            until(running, lambda: rows(storage, datastore, consumer))

        for calls in (10, 30):
            wait_for(lambda calls=calls: called(tmp_path) >= calls)
            worker.kill_and_restart()  # from outside, while calls are in flight
        put(storage, datastore, [new_cell(datastore, {"ends": ends}, shard=POISONED)])
        put_cells(BEFORE)
        master = storage.master(datastore.home(POISONED))

        def parked():
            return master.run(parked_table.of_shards, datastore.name, consumer, range(SHARDS))

        wait_for(lambda: len(rows(storage, datastore, consumer)) == SHARDS)
        wait_for(lambda: reached(storage, datastore, consumer) == heads(storage, datastore))
        (record,) = parked()
        assert (record.added_id, record.cause) == (BEFORE + 1, cause)
        assert record.kills == (0 if cause is Cause.ERROR else KILLS_MAX)
        assert ended <= (0 if cause is Cause.ERROR else KILLS_MAX + 1)
        assert {(row.state, row.kills) for row in rows(storage, datastore, consumer).values()} == {(State.RUNNING, 0)}
        (tmp_path / "repaired").touch()
        marked = "UPDATE schemaless.parked SET ordered = 'retry', due_at = UTC_TIMESTAMP(6)"
        master.run(lambda: query(marked))
        wait_for(lambda: not parked())
        wait_for(lambda: reached(storage, datastore, consumer) == heads(storage, datastore))
        wait_for(lambda: worker.process.poll() is None)
        numbers = {row.worker for row in rows(storage, datastore, consumer).values()}
        assert worker.stop() == 0
    assert {(row.begun, row.kills) for row in rows(storage, datastore, consumer).values()} == {(False, 0)}
    left = [storage.master(c).run(worker_table.numbers_of, datastore.name, consumer) for c in datastore.clusters]
    assert not numbers & set().union(*left)  # a clean stop leaves no row
