"""A trigger program as its workers leave it in MySQL, made by hand: checkpoints, parked cells, functions."""

from schemaless.names import trigger_consumer
from schemaless.position import Position
from schemaless.storage import checkpoint_table, parked_table, trigger_order_table
from schemaless.storage.checkpoint_table import CellCounts, Move
from schemaless.storage.parked_table import Cause, ParkedCell
from schemaless.storage.trigger_order_table import ProgramFunctions
from tests.integration.api.api_harness import row_in
from tests.log_harness import run_sql

PROGRAM = "billing"
CONSUMER = trigger_consumer(PROGRAM)
FUNCTIONS = ProgramFunctions({"BASE": ["bill"], "STATUS": ["notify"]}, "v2")


class Stage:
    """A program with checkpoints at the heads of two shards, one on each cluster, and the parked cells of a test."""

    def __init__(self, storage, datastore, call):
        self.storage, self.datastore, self.call = storage, datastore, call
        self.rows = {shard: row_in(datastore, shard) for shard in (0, 1)}

    def master(self, shard):
        return self.storage.master(self.datastore.home(shard))

    def put(self, shard, ref_key, column="BASE", row=None):
        """Returns the added_id."""
        return self.call.put(row or self.rows[shard], ref_key, {"n": ref_key}, column).json()["added_id"]

    def checkpoint(self, shard, added_id):
        name, at = self.datastore.name, Position(shard, 1, added_id, digest=None)
        self.master(shard).run(checkpoint_table.make, name, CONSUMER, [Position(shard, 1, 0)])
        moved = Move(CONSUMER, 0, at, added_id, counts=CellCounts(called=max(0, added_id - 1), parked=min(1, added_id)))
        self.master(shard).run(checkpoint_table.move, name, [moved])

    def park(self, shard, added_id, function="bill", cause=Cause.ERROR, row=None, **more):
        record = ParkedCell(
            shard, 1, added_id, (row or self.rows[shard]).bytes, "BASE", 1, function, cause, more.pop("holds", True),
            "ValueError: no card", 5, [1_700_000_000_000_000], "v1", 1_700_000_000_000_000 + added_id, **more,
        )  # fmt: skip
        self.sql(shard, parked_table.put(self.datastore.name, CONSUMER, record))

    def sql(self, shard, script):
        run_sql(self.master(shard), script)

    def parked(self, **params):
        return self.call.get(f"/triggers/{PROGRAM}/parked", params=params)

    def order(self, action, **document):
        return self.call.post(f"/triggers/{PROGRAM}/parked/{action}", json=document)

    def announce(self):
        for cluster in self.datastore.clusters:
            self.storage.master(cluster).run(trigger_order_table.claim, self.datastore.name, CONSUMER, FUNCTIONS)

    def records(self, shard):
        return self.master(shard).run(parked_table.of_shards, self.datastore.name, CONSUMER, [shard])
