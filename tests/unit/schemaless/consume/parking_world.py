"""A trigger program in memory (schemaless/testing/), over one shard: what the tests of parking ask of it, in short."""

import uuid

import msgspec

from schemaless.cell import CellKey
from schemaless.codec import encode_body
from schemaless.consume.trigger_program import TriggerProgram
from schemaless.storage.entity_table import ShardCell
from schemaless.storage.parked_table import Order
from schemaless.testing.memory_program import MemoryEntityTable, MemoryProgram
from schemaless.testing.trigger_kit import MemoryWorker, memory_settings
from schemaless.topology import Datastore
from schemaless.triggers.decorator import triggers_of

SHARD = 0


def row_key(n):
    return uuid.UUID(int=n)


class Server(MemoryProgram):
    """What MySQL holds. It outlives processes. `parked` is by added_id here."""

    row_cells_max = 3

    def __init__(self):
        datastore = Datastore("d", 1, 1, ("a",))
        super().__init__("trigger:test", datastore, MemoryEntityTable(datastore, clock_us=lambda: 1_000_000))
        self.parked = ByAddedId()

    @property
    def cells(self):
        return self.table.read_after(SHARD, 0, 1 << 20)

    def write(self, row, column="BASE", body=None):
        """Adds a cell to the log, and returns its added_id, which is its ref_key."""
        n = self.table.heads()[SHARD].added_id + 1
        self.table.put_cells([ShardCell(CellKey(row_key(row).bytes, column, n), encode_body(body or {"n": n}), SHARD)])
        return n

    def order(self, added_id, order):
        """A person orders something for a record."""
        super().order(self.parked[added_id], order)

    def change(self, added_id, **changes):
        """Changes a record, as a person's order does."""
        self.parked[SHARD, added_id] = msgspec.structs.replace(self.parked[added_id], **changes)

    def causes(self):
        return {record.added_id: record.cause.value for record in self.records()}

    def __getattr__(self, name):
        return getattr(self.checkpoints[SHARD], name)


class ByAddedId(dict):
    """The records of the only shard: one is found by its added_id, too."""

    def __missing__(self, key):
        return self[SHARD, key]


class Process(MemoryWorker):
    """One worker with these functions."""

    def __init__(self, server, number, functions, *, version="v1", **options):
        by_column = {}
        for found in triggers_of({str(n): function for n, function in enumerate(functions)}):
            by_column.setdefault(found.column, []).append(found)
        settings = memory_settings(**{"retry_delay_s": 1.0, "retry_delay_max_s": 1.0, "attempts_max": 3} | options)
        super().__init__(
            server, TriggerProgram("test", by_column, version), number, settings, now=max(100.0, server.now)
        )


__all__ = ["SHARD", "Order", "Process", "Server", "row_key"]
