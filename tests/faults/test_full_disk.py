"""A master's disk runs full and is freed again: nothing acknowledged is lost, puts go on meanwhile (I5, I6)."""

import asyncio
import base64
import os
import random
import shutil
import statistics
import subprocess
import time
import uuid
from collections import Counter
from pathlib import Path

import pytest

from api.write.put import CellWriter, PutOutcome
from cleaner.service import Cleaner
from schemaless.cell import Cell, CellKey, ColumnName, PutStatus, RefKey, RowKey
from schemaless.codec import encode_body
from schemaless.config import ApiSettings
from schemaless.ops.datastores import create_shards
from schemaless.stack.local import running_topology
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.pymysql_driver import SyncStorage
from schemaless.topology import Datastore
from tests.conftest import FLAVOUR
from tests.faults.test_masters_killed_under_load import logs, quiet
from tests.waiting import async_until

pytestmark = [pytest.mark.storage, pytest.mark.faults]

SETTINGS = ApiSettings(topology=Path("unused"), kafka="unused")
DISK_MIB = 700
LEFT_BYTES = 8 << 20
BODY_BYTES = 96 << 10
ANSWER_MAX_S = 3.0
"""CONTRACT: a put is answered within that time when its home is away. Half of the puts show it on any machine."""


@pytest.fixture
def disk(tmp_path):
    """A small file system where the master of cluster a is going to keep its data."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small file system")
    folder = tmp_path / "mysql" / "a1"
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def large_cell(rng: random.Random) -> Cell:
    key = CellKey(RowKey(uuid.uuid4().bytes), ColumnName("BASE"), RefKey(1))
    return Cell(key, encode_body({"noise": base64.b64encode(rng.randbytes(BODY_BYTES)).decode()}))


async def put_stored(writer: CellWriter, datastore: Datastore, count: int) -> list:
    """Cells with what was told of them, until so many were stored at home: it may stand for a moment."""
    rng, told = random.Random(11), []

    async def is_stored() -> bool:
        cell = large_cell(rng)
        (outcome,) = await writer.put(datastore, [cell])
        told.append((cell, outcome))
        return isinstance(outcome, PutOutcome) and outcome.status is PutStatus.STORED

    for _ in range(count):
        await async_until(is_stored)
    return told


async def put_many(writer: CellWriter, datastore: Datastore, count: int) -> list:
    """Cells with what was told of them."""
    rng, told, seconds = random.Random(7), [], []
    for _ in range(count):
        cell, began = large_cell(rng), time.monotonic()
        (outcome,) = await writer.put(datastore, [cell])
        seconds.append(time.monotonic() - began)
        told.append((cell, outcome))
    assert statistics.median(seconds) < ANSWER_MAX_S
    return told


async def test_a_full_disk_loses_nothing_that_was_acknowledged(disk, tmp_path):
    """While the home's disk is full its cells are buffered elsewhere; once there is room they all stand at home."""
    with running_topology(tmp_path / "mysql", minions=1, flavour=FLAVOUR) as running:
        with SyncStorage(running.topology) as storage:
            datastore = create_shards(
                storage, Datastore("full", 4, 2, ("a", "b")), administrators=running.administrators
            )
        async with AsyncStorage(running.topology, connect_timeout_s=30.0, timeout_s=60.0) as storage:
            writer = CellWriter(storage, SETTINGS)
            before = await put_stored(writer, datastore, 20)
            ballast = disk / "ballast"
            with ballast.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(disk).free - LEFT_BYTES)
            during = await put_many(writer, datastore, 250)
            ballast.unlink()
            running.servers["a1"].kill()  # left alone it looks for room once a minute
            running.servers["a1"].start()
            stop = asyncio.Event()
            cleaning = asyncio.create_task(Cleaner(storage).run(stop))
            await quiet(storage, datastore)
            after = await put_stored(writer, datastore, 20)
            await quiet(storage, datastore)
            stop.set()
            await cleaning
            await writer.close()
            found = await logs(storage, datastore)

    counts = Counter(outcome.status for _, outcome in during if isinstance(outcome, PutOutcome))
    assert counts[PutStatus.BUFFERED] > 20, counts
    acknowledged = [cell for cell, outcome in before + during + after if isinstance(outcome, PutOutcome)]
    assert [cell.key for cell in acknowledged if found[cell.key].body != cell.body] == []
