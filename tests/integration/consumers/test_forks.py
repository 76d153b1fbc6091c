"""Functions that fork: the child is no second worker, and holds nothing of the first one."""

import os
import signal
from pathlib import Path

import pytest

from schemaless.bus.topics import ensure_topics
from tests.consumer_harness import running_consumer, wait_until_finished, write_program
from tests.log_harness import new_cell, put, running_tailers
from tests.waiting import until

CELLS = 40
ENDS = ("exits", "fails", "returns", "lasts")
"""What a child does: the last one doesn't end by itself."""
PROGRAM = """
import asyncio, os, pathlib, sys, time
from schemaless import trigger

HERE = pathlib.Path(__file__).parent
CALLS = os.open(HERE / "calls", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
CHILDREN = os.open(HERE / "children", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

@trigger(column="BASE")
{kind} work(cell):
    os.write(CALLS, f"{{os.getpid()}} {{cell.body['n']}}\\n".encode())
    child = cell.body["child"]
    if child and os.fork() == 0:
        os.write(CHILDREN, f"{{os.getpid()}} {{child}}\\n".encode())
        if child == "exits":
            sys.exit(3)
        if child == "fails":
            raise ValueError("in a child")
        if child == "lasts":
            time.sleep(600)
    {pause}
"""


def lines(file):
    return [line.split() for line in file.read_text().splitlines()] if file.exists() else []


def has_ended(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] == "Z"
    except FileNotFoundError:
        return True


def connections(pid):
    """The inodes of the TCP sockets that a process holds: connections, and ports that it listens at."""
    inodes = {line.split()[9] for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]}
    held = {os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()}
    return {name for name in held if name.removeprefix("socket:[").removesuffix("]") in inodes}


@pytest.mark.parametrize(("kind", "pause"), [("def", "pass"), ("async def", "await asyncio.sleep(0)")])
def test_a_child_ends_where_it_leaves_the_call(tmp_path, running, kafka, storage, make_datastore, kind, pause):
    """The worker makes each call once, and ends when it is told to."""
    datastore = make_datastore(shards=4, partitions=2)
    ensure_topics(kafka, datastore)
    program = write_program(tmp_path, "forks", PROGRAM.format(kind=kind, pause=pause))
    children = {n * 8 + 3: end for n, end in enumerate(ENDS)}
    settings = {"topology": running.path, "kafka": kafka, "metrics_port": 0}
    command = ["consumers", program, "--datastore", datastore.name]
    with (
        running_tailers(1, running.path, kafka, datastore),
        running_consumer(command, settings) as worker,
    ):
        put(storage, datastore, [new_cell(datastore, {"n": n, "child": children.get(n)}) for n in range(CELLS)])
        wait_until_finished(storage, datastore, "trigger:forks")
        born = until(lambda: len(found := lines(tmp_path / "children")) == len(ENDS) and found)
        pids = {end: int(pid) for pid, end in born}
        try:
            until(lambda: all(has_ended(pid) for end, pid in pids.items() if end != "lasts"))
            assert connections(worker.process.pid)
            assert connections(pids["lasts"]) == set()
            assert worker.stop() == 0
        finally:
            os.kill(pids["lasts"], signal.SIGTERM)
        until(lambda: has_ended(pids["lasts"]))
    called = lines(tmp_path / "calls")
    assert sorted(int(n) for _, n in called) == list(range(CELLS))
    assert {int(pid) for pid, _ in called} == {worker.process.pid}
