"""The examples of docs/subscribers.md as processes, on real servers; two of them killed on the way."""

import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest

from schemaless.bus.topics import ensure_topics
from tests.consumer_harness import heads
from tests.log_harness import new_cell, put, running_tailers, wait_for_records
from tests.waiting import until

pytestmark = pytest.mark.faults

TIMEOUT_S = 40


@pytest.fixture(scope="module")
def datastore(running, kafka, make_datastore):
    """With a tailer."""
    made = make_datastore(shards=4, partitions=2)
    ensure_topics(kafka, made)
    with running_tailers(1, running.path, kafka, made):
        yield made


@pytest.fixture
def example(api, kafka, datastore):
    """example(name, *arguments) starts one; all are killed at the end."""
    started = []
    environment = {
        **os.environ,
        "SCHEMALESS_HOSTS": f"http://127.0.0.1:{api.port}",
        "SCHEMALESS_KAFKA": kafka,
        "DATASTORE": datastore.name,
    }

    def start(name, *arguments, **variables):
        command = [sys.executable, "-m", f"examples.{name}", *map(str, arguments)]
        process = subprocess.Popen(command, env=environment | variables, stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def write(storage, datastore, count):
    put(storage, datastore, [new_cell(datastore) for _ in range(count)])


def total(storage, datastore):
    return sum(heads(storage, datastore).values())


def counted(database):
    """By shard."""
    with closing(sqlite3.connect(database)) as counts:
        tables = {name for (name,) in counts.execute("SELECT name FROM sqlite_master")}
        return dict(counts.execute("SELECT shard, SUM(cells) FROM counts GROUP BY 1")) if "counts" in tables else {}


def test_counts_are_exact_whatever_kills_their_process(example, storage, kafka, datastore, tmp_path, chance):
    """kill -9 under load, at any moment at which it counts: each cell is counted once, positions stand at the heads."""
    database = tmp_path / "counts.db"
    arguments = ("column_counts", "--kafka", kafka, "--datastore", datastore.name, "--database", database)
    for _ in range(4):
        process, before = example(*arguments), counted(database)
        while counted(database) == before:
            write(storage, datastore, 20)
        ends = time.monotonic() + chance.uniform(0, 0.4)
        while time.monotonic() < ends:
            write(storage, datastore, 20)
        process.kill()
        process.wait()
    process = example(*arguments)
    until(lambda: counted(database) == heads(storage, datastore))
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, output) == (0, f"BASE {total(storage, datastore)}\n")
    with closing(sqlite3.connect(database)) as counts:
        positions = dict(counts.execute("SELECT shard, added_id FROM positions"))
    assert positions == heads(storage, datastore)


def test_cells_are_printed_by_a_plain_consumer(example, storage, kafka, datastore):
    """Every cell that the topic holds, once when nothing fails."""
    write(storage, datastore, 10)
    count = total(storage, datastore)
    wait_for_records(kafka, datastore, count)
    process = example(
        *("print_cells", "--kafka", kafka, "--datastore", datastore.name, "--group", f"{datastore.name}.p"),
        *("--limit", count),
    )
    output, _ = process.communicate(timeout=TIMEOUT_S)
    cells = [tuple(line.split(" ", 3)[:2]) for line in output.splitlines()]
    assert (process.returncode, len(cells), len(set(cells))) == (0, count, count)


def listening(pid):
    """The addresses, as the kernel writes them, at which a process listens."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            inodes.add(os.readlink(descriptor))
    tables = [Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:] for table in ("tcp", "tcp6")]
    fields = [line.split() for table in tables for line in table]
    return [field[1] for field in fields if field[3] == "0A" and f"socket:[{field[9]}]" in inodes]


def test_an_agent_of_a_users_app_is_given_every_cell(example, storage, kafka, datastore, tmp_path):
    """kill -9 and a new start: all locations are noted, none is lost."""
    write(storage, datastore, 10)

    def noted():
        lines = [line for path in tmp_path.glob("*.tsv") for line in path.read_text().splitlines(keepends=True)]
        return {line.split("\t")[2].strip() for line in lines if line.endswith("\n")}

    process = example("faust_cells", "worker", "--loglevel", "error", CELLS_DIR=str(tmp_path))
    until(noted)
    assert listening(process.pid) == []  # Faust's own command opens 0.0.0.0:6066
    process.kill()
    process.wait()
    write(storage, datastore, 10)
    example("faust_cells", "worker", "--loglevel", "error", CELLS_DIR=str(tmp_path))
    wanted = {f"{shard}:1:{n}" for shard, head in heads(storage, datastore).items() for n in range(1, head + 1)}
    until(lambda: noted() == wanted)
