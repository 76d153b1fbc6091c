"""One huge shard beside many small ones: each shard is served in every pass, whatever waits (I7, I14)."""

import signal
import uuid

from schemaless.audit.run import audit
from schemaless.bus.topics import ensure_topics
from schemaless.cell import CellKey
from schemaless.codec import decode_cell, encode_body
from schemaless.sharding import shard_of
from schemaless.storage.entity_table import ShardCell
from tests.log_harness import new_cell, put, records, running_tailers, wait_for_records
from tests.waiting import until

SHARDS = 64
HUGE = 0
BACKLOG_CELLS = 10_000
BATCH_CELLS = 500
INSERT_CELLS = 1000


def backlog(datastore):
    """Cells of one row of the huge shard."""
    row_key = next(key for key in iter(lambda: uuid.uuid4().bytes, b"") if shard_of(key, SHARDS) == HUGE)
    body = encode_body({"n": 1})
    return [ShardCell(CellKey(row_key, "BASE", ref_key), body, HUGE) for ref_key in range(BACKLOG_CELLS)]


def positions_of_small_ones(found):
    """By added_id, where cells of small shards stand among all records."""
    cells = [decode_cell(record.value) for record in found]
    return {
        added_id: [
            position for position, cell in enumerate(cells) if (cell.shard != HUGE, cell.added_id) == (1, added_id)
        ]
        for added_id in (1, 2)
    }


def test_small_shards_do_not_wait_for_a_huge_one(running, kafka, storage, make_datastore, tmp_path):
    """A backlog drains in transactions of 500 cells, one in flight at a time. After the first one the tailer halts.

    A cell that each small shard had before is published in the first pass. One that arrives meanwhile overtakes most of
    what is left of the backlog.
    """
    datastore = make_datastore(shards=SHARDS, partitions=1)
    ensure_topics(kafka, datastore)
    cells = backlog(datastore)
    for begin in range(0, BACKLOG_CELLS, INSERT_CELLS):
        put(storage, datastore, cells[begin : begin + INSERT_CELLS])
    small = range(1, SHARDS)
    put(storage, datastore, [new_cell(datastore, shard=shard) for shard in small])
    (armed := tmp_path / "armed").touch()
    module = ("tests.faults.halting_tailer", "commit answered", "SIGSTOP", str(armed))
    constants = {"tailer.partition_tail.TRANSACTION_CELLS_MAX": BATCH_CELLS, "tailer.service.TRANSACTIONS_MAX": 1}
    arguments = (running.path, kafka, datastore)
    with running_tailers(1, *arguments, module=module, constants=constants) as (tailer,):
        until(tailer.halted)
        put(storage, datastore, [new_cell(datastore, shard=shard) for shard in small])
        published_before = len(records(kafka, datastore))
        tailer.send(signal.SIGCONT)
        found = wait_for_records(kafka, datastore, BACKLOG_CELLS + 2 * len(small))
        report = audit(running.topology, kafka, datastore, stall_s=5)
    positions = positions_of_small_ones(found)
    assert max(positions[1]) < 3 * BATCH_CELLS
    left = len(found) - published_before
    assert left > BACKLOG_CELLS / 2, "the backlog was still there"
    assert max(positions[2]) < published_before + left / 2
    assert report.findings.named == []
