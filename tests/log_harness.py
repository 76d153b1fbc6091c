"""What the tests of the log share: real tailer processes, writers, and a plain reader of a topic."""

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random

from schemaless.bus.reader import PartitionReader
from schemaless.cell import CellKey, RowKey, StoredCell
from schemaless.codec import decode_cell, encode_body
from schemaless.config import TailerSettings
from schemaless.errors import Busy, Unavailable
from schemaless.sharding import shard_of
from schemaless.stack.local import halt, halted
from schemaless.storage import entity_table, erasure_table
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.entity_table import ShardCell
from schemaless.storage.erasure_table import Erasure
from schemaless.storage.pymysql_driver import SyncNode
from schemaless.topology import Datastore
from tests.environment import environment_of
from tests.patched import patched
from tests.seed import seeded
from tests.waiting import until

_bodies = seeded("bodies")


class TailerProcess:
    """`python -m tailer` for one datastore, with short time-outs. `module`: another one that runs it. `constants`:
    values of its modules.
    """

    def __init__(
        self,
        topology_file,
        kafka: str,
        datastore: Datastore,
        *,
        module: Sequence[str] = ("tailer",),
        constants: Mapping[str, object] | None = None,
        output: Path | None = None,
        **settings: object,
    ) -> None:
        named = {
            "topology": topology_file,
            "kafka": kafka,
            "datastores": datastore.name,
            "session_timeout_s": 2.0,
            "transaction_timeout_s": 2.0,
            **settings,
        }
        self._environment = {
            **os.environ,
            **environment_of(TailerSettings, named),
        }
        self._command = [sys.executable, *patched(module, constants or {})]
        self._output = output
        self.process = self._start()

    def _start(self) -> subprocess.Popen:
        with contextlib.ExitStack() as stack:
            output = stack.enter_context(self._output.open("ab")) if self._output else None
            return subprocess.Popen(
                self._command, env=self._environment, stdout=output, stderr=output, start_new_session=True
            )

    def said(self) -> str:
        """All that it wrote so far."""
        return self._output.read_text()

    def halted(self) -> bool:
        """Whether it stands still, after a SIGSTOP."""
        return halted(self.process.pid)

    def resident_bytes_max(self) -> int:
        """Since it was started."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) << 10

    def halt(self) -> None:
        """SIGSTOP; returns when it stands still."""
        halt(self.process.pid)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill_and_restart(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process = self._start()

    def stop(self, timeout_s: float = 60.0) -> int:
        """SIGTERM; its exit status."""
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        return self.process.wait(timeout_s)


@contextmanager
def running_tailers(count: int, *arguments: object, **settings: object) -> Iterator[list[TailerProcess]]:
    tailers = [TailerProcess(*arguments, **settings) for _ in range(count)]
    try:
        yield tailers
    finally:
        for tailer in tailers:
            if tailer.process.poll() is None:
                tailer.process.send_signal(signal.SIGCONT)
                tailer.process.kill()
                tailer.process.wait()


def new_cell(datastore: Datastore, body: dict | None = None, shard: int | None = None) -> ShardCell:
    """A cell under a fresh row key, of one shard if it is named."""
    while True:
        row_key = uuid.uuid4().bytes
        home = shard_of(row_key, datastore.shards)
        if shard in (None, home):
            return ShardCell(CellKey(row_key, "BASE", 1), encode_body(body or {"n": _bodies.random()}), home)


def put(storage, datastore: Datastore, cells: Sequence[ShardCell]) -> None:
    """Through the masters, shard by shard."""
    for shard in sorted({cell.shard for cell in cells}):
        mine = [cell for cell in cells if cell.shard == shard]
        storage.master(datastore.home(shard)).run(entity_table.put_cells, datastore, mine)


def erased_at_home(
    storage, datastore: Datastore, row_key: RowKey, column: str | None = None, ref_key: int | None = None
) -> Erasure:
    """Orders an erasure on every master, and erases a page of it at home."""
    number, now, shard = secrets.randbits(63), int(time.time() * 1e6), shard_of(row_key, datastore.shards)
    made = Erasure(number, datastore.name, shard, row_key, column, ref_key, "asked to", "ada", now)
    for cluster in datastore.clusters:
        storage.master(cluster).run(erasure_table.order, made)
    storage.master(datastore.home(shard)).run(erasure_table.erase_page, datastore, made)
    return made


def run_sql(node, script: str) -> None:
    """Statements that no operation has: damage, and what promotion will do."""

    def operation():
        yield script

    node.run(operation)


def restore(master, datastore: Datastore, shard: int, kept: int) -> None:
    """What a restore from an older state does to a shard: cells behind `kept` are gone, in the same generation."""
    run_sql(
        master,
        f"BEGIN;DELETE FROM {datastore.database(shard)}.entity WHERE added_id > {kept};UPDATE schemaless.shard_head"
        f" SET head = {kept} WHERE datastore = '{datastore.name}' AND shard = {shard};COMMIT",
    )


async def write_for(storage: AsyncStorage, datastore: Datastore, seconds: float, writers: int = 6) -> int:
    """Writers at once, batches of several sizes with pauses, some cells sent twice; how many cells there are."""
    end = time.monotonic() + seconds
    counts = await asyncio.gather(*(_write(storage, datastore, end, seeded(f"writer {n}")) for n in range(writers)))
    return sum(counts)


async def _write(storage: AsyncStorage, datastore: Datastore, end: float, chance: Random) -> int:
    written = 0
    while time.monotonic() < end:
        shard = chance.randrange(datastore.shards)
        cells = [new_cell(datastore, shard=shard) for _ in range(chance.choice((1, 1, 2, 20)))]
        again = cells + cells[: chance.choice((0, 0, 1))]
        while True:
            try:
                await storage.master(datastore.home(shard)).run(entity_table.put_cells, datastore, again)
                break
            except (Unavailable, Busy):  # a head that is locked for longer than a second, too; a put may be repeated
                await asyncio.sleep(0.1)
        written += len(cells)
        await asyncio.sleep(chance.random() * 0.02)
    return written


def records(kafka: str, datastore: Datastore, at_least: int = 0) -> list:
    """What a read_committed reader sees now, partition by partition, in the topic's order.

    Nothing, and soon, when there are not even as many offsets as `at_least`.
    """
    with PartitionReader(kafka) as reader:
        spans = [reader.committed_span(datastore.topic, partition) for partition in range(datastore.partitions)]
        if sum(span.high - span.low for span in spans) < at_least:
            return []
        return [
            record
            for partition, span in enumerate(spans)
            for batch in reader.read(datastore.topic, partition, span)
            for record in batch
        ]


def wait_for_records(kafka: str, datastore: Datastore, count: int) -> list:
    """Returns once the topic, which may have to be made first, shows so many records."""
    few = f"fewer than {count} records are in the topic"
    (found,) = until(lambda: [found] if len(found := records(kafka, datastore, count)) >= count else [], lambda: few)
    return found


def wait_for_cells(kafka: str, datastore: Datastore, count: int) -> list[StoredCell]:
    """All cells, in the topic's order, once there are so many."""
    found = wait_for_records(kafka, datastore, count)
    return [decode_cell(record.value) for record in found if record.kind == b"cell"]


LOCAL_WRITE = "SET sql_log_bin = 0"
"""Lets an administrator's next statements change this server alone."""

REPLICATED_WRITE = "SET sql_log_bin = 1"


@contextmanager
def replication_stopped(minion: SyncNode) -> Iterator[None]:
    """The minion applies nothing meanwhile, and shows what it showed."""
    run_sql(minion, "STOP REPLICA SQL_THREAD")
    try:
        yield
    finally:
        run_sql(minion, "START REPLICA SQL_THREAD")
