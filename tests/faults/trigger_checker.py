"""A judge of runs of a trigger program. It knows the promises, and nothing of how they are kept.

It reads what the program noted of its calls, what the store says, and what people are shown. The program notes each
call in a CallLog: `begin` or `end`, row key, ref_key and the machine's monotonic clock in nanoseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from schemaless import Client
from schemaless.storage import checkpoint_table, parked_table, shard_head, shard_log
from schemaless.storage.pymysql_driver import SyncStorage
from schemaless.storage.shard_log import LogRange
from schemaless.topology import Datastore

HEAD_CAUSES = ("error", "verdict", "killed", "hung")


@dataclass(frozen=True)
class Noted:
    """A line of a call log."""

    at: int
    what: str
    row_key: str
    ref_key: int


def noted_calls(folder: Path) -> list[Noted]:
    """Returns what all processes noted, in the order of time. The last line of a killed one may be torn."""
    lines = [line for path in folder.glob("*.tsv") for line in path.read_text().splitlines(keepends=True)]
    fields = [line.rstrip("\n").split("\t") for line in lines if line.endswith("\n")]
    return sorted(
        [Noted(int(at), what, row_key, int(ref_key)) for what, row_key, ref_key, at in fields], key=lambda n: n.at
    )


class TriggerChecker:
    """The promises to one program, which is called for the cells of one column."""

    def __init__(
        self, storage: SyncStorage, datastore: Datastore, program: str, column: str, client: Client, folder: Path
    ) -> None:
        self._storage = storage
        self._datastore = datastore
        self._program = program
        self._column = column
        self._client = client
        self._folder = folder

    def check_finished(self) -> None:
        """Nothing is finished before its effect: a cell that the checkpoint passed was called, or has a record.

        It may be asked at any moment of a run, because calls are read last and are never taken back.
        """
        finished, held = [], set()
        for cluster in self._datastore.clusters:
            master, name = self._storage.master(cluster), self._datastore.name
            rows = master.run(checkpoint_table.of_consumer, name, f"trigger:{self._program}")
            records = master.run(parked_table.of_shards, name, f"trigger:{self._program}", [row.shard for row in rows])
            held |= {(record.row_key, record.added_id) for record in records}
            for row in rows:
                finished += [cell for cell in self._cells(row.shard) if cell.added_id <= row.location.added_id]
        ended = {(call.row_key, call.ref_key) for call in noted_calls(self._folder) if call.what == "end"}
        for cell in finished:
            waits = any(row_key == cell.row_key and added_id <= cell.added_id for row_key, added_id in held)
            assert waits or _name(cell) in ended, f"{cell.key} is finished and was never called"

    def check_order(self) -> None:
        """A row's cells are called in their order: the next one begins after the one before has ended once."""
        before: dict[str, list[int]] = {}
        for shard in range(self._datastore.shards):
            for row_key, ref_key in map(_name, self._cells(shard)):
                before.setdefault(row_key, []).append(ref_key)
        ended: set[tuple[str, int]] = set()
        for call in noted_calls(self._folder):
            if call.what == "end":
                ended.add((call.row_key, call.ref_key))
                continue
            refs = before[call.row_key]
            for earlier in refs[: refs.index(call.ref_key)]:
                assert (call.row_key, earlier) in ended, f"{call} began before {earlier} had ended"

    def check_status(self) -> list[dict]:
        """What people see is what the store has: heads, counts that close, and the list. Returns the parked heads."""
        program = self._client.program(self._program)
        status, listed = program.status(), list[dict]()
        page = program.parked(limit=500)
        while True:
            listed += page["parked"]
            if page["cursor"] is None:
                break
            page = program.parked(limit=500, cursor=page["cursor"])
        heads = [cell for cell in listed if cell["cause"] in HEAD_CAUSES]
        counts = status["counts"]
        total = sum(head.added_id for head in self._heads())
        assert counts["seen"] == sum(counts[name] for name in ("called", "filtered", "skipped", "parked", "waiting"))
        assert counts["seen"] == total, (counts, total)
        assert status["parked"] == counts["parked"] == len(heads)
        assert counts["waiting"] == len(listed) - len(heads)
        return heads

    def check_all_called(self, parked: list[dict]) -> None:
        """At the end every cell was called to its end, or is parked, or waits behind a parked one."""
        ended = {(call.row_key, call.ref_key) for call in noted_calls(self._folder) if call.what == "end"}
        rows = {cell["row_key"]: cell["added_id"] for cell in parked}
        for shard in range(self._datastore.shards):
            for cell in self._cells(shard):
                row_key, _ = _name(cell)
                is_behind = row_key in rows and rows[row_key] <= cell.added_id
                assert (_name(cell) in ended) is not is_behind, f"{cell.key} was neither called nor parked, or both"

    def is_settled(self) -> bool:
        """Whether the checkpoints are at the heads, and no row waits for an attempt or for what people ordered."""
        heads = {head.shard: head.added_id for head in self._heads()}
        name, found, waiting = self._datastore.name, {}, 0
        for cluster in self._datastore.clusters:
            master = self._storage.master(cluster)
            for row in master.run(checkpoint_table.of_consumer, name, f"trigger:{self._program}"):
                found[row.shard] = row.location.added_id
            records = master.run(parked_table.of_shards, name, f"trigger:{self._program}", range(len(heads)))
            waiting += sum(record.cause == "waiting" or record.ordered is not None for record in records)
        return found == heads and not waiting

    def _heads(self):
        for cluster in self._datastore.clusters:
            yield from self._storage.master(cluster).run(shard_head.heads, self._datastore.name)

    def _cells(self, shard: int):
        """Returns the cells of the column, from the log."""
        master, after, found = self._storage.master(self._datastore.home(shard)), 0, []
        while True:
            (page,) = master.run(shard_log.read, self._datastore, [LogRange(shard, after, 1000)], 1 << 24)
            if not page:
                return found
            found += [cell for cell in page if cell.column_name == self._column]
            after = page[-1].added_id


def _name(cell) -> tuple[str, int]:
    text = cell.row_key.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}", cell.ref_key
