"""A shard that is moved by hand, step by step, so that a test can stand between any two of them."""

import time

from schemaless.storage import placement_table, schema, shard_head
from schemaless.storage.operation import query
from schemaless.storage.pymysql_driver import SyncStorage
from schemaless.storage.shard_head import MICROSECONDS
from schemaless.storage.sql import Expression, Name, Time, commas, literals, sql, where
from schemaless.topology import Datastore, Placement
from tests.waiting import until


class ShardMove:
    """The move of one shard from its present home to `target`. `back` is the same move with both exchanged."""

    def __init__(self, storage: SyncStorage, datastore: Datastore, shard: int, target: str) -> None:
        self.datastore = datastore
        self.shard = shard
        self.target = target
        self._storage = storage
        known = storage.masters[0].run(placement_table.placements).get(datastore.name, {}).get(shard)
        self.home = known.home if known else datastore.placement[shard % len(datastore.placement)]
        self._number = known.number if known else 0
        self._head = where(datastore=datastore.name, shard=shard)

    def all(self) -> None:
        for step in (self.announce, self.close, self.copy_all, self.open_at, self.publish):
            step()

    def back(self) -> "ShardMove":
        return ShardMove(self._storage, self.datastore, self.shard, self.home)

    def announce(self) -> None:
        self._place(self.home, self.target)

    def close(self) -> None:
        master = self._storage.master(self.home)
        master.run(query, f"UPDATE schemaless.shard_head SET moved_to = '{self.target}' {self._head}")
        self._until_shown(self.home, self.target)

    def reopen(self) -> None:
        self._storage.master(self.home).run(query, f"UPDATE schemaless.shard_head SET moved_to = NULL {self._head}")
        self._until_shown(self.home, None)

    def copy_all(self) -> None:
        source, target = self._storage.master(self.home), self._storage.master(self.target)
        had_head = bool(target.run(shard_head.heads_of, self.datastore.name, [self.shard]))
        target.run(schema.create_shard, self.datastore, self.shard)
        if not had_head:
            target.run(query, f"DELETE FROM schemaless.shard_head {self._head}")
        of_datastore = where(datastore=self.datastore.name)
        entity = sql("%s.entity", Name(self.datastore.database(self.shard)))
        for table, columns, moment, which in (
            (entity, "added_id, generation, row_key, column_name, ref_key, body, cause", "created_at", ""),
            ("schemaless.shard_generation", "datastore, shard, generation, starts_at", "opened_at", self._head),
            (
                "schemaless.idempotency",
                "datastore, row_key, column_name, idempotency_key, ref_key",
                "created_at",
                of_datastore,
            ),
        ):
            rows = source.run(query, f"SELECT {columns}, {MICROSECONDS.format(moment)} FROM {table} {which}")
            if rows:
                values = commas([literals(*row[:-1], Time(row[-1])) for row in rows])
                target.run(query, f"REPLACE INTO {table} ({columns}, {moment}) VALUES {values}")

    def open_at(self) -> None:
        generation, head, created_at = self._storage.master(self.home).run(
            query,
            f"SELECT generation, head, {MICROSECONDS.format('last_created_at')}"
            f" FROM schemaless.shard_head {self._head}",
        )[0]
        epoch = sql("(SELECT COALESCE(MAX(epoch), 0) FROM schemaless.appointment WHERE cluster = %s)", self.target)
        row = (self.datastore.name, self.shard, generation, head, Time(created_at), Expression(epoch), None)
        target = self._storage.master(self.target)
        target.run(query, f"REPLACE INTO schemaless.shard_head VALUES {literals(*row)}")
        self._until_shown(self.target, None)

    def publish(self) -> None:
        self._place(self.target, None)

    def _place(self, home: str, coming: str | None) -> None:
        self._number += 1
        changed_at = time.time_ns() // 1000
        row = Placement(self.datastore.name, self.shard, self._number, home, coming, changed_at)
        for master in self._storage.masters:
            master.run(placement_table.write, [row])
        for node in self._storage.nodes.values():
            _until(
                lambda node=node: row in node.run(placement_table.TABLE.rows, ""),
                f"{node.node.name} doesn't show {row}",
            )

    def _until_shown(self, cluster: str, moved_to: str | None) -> None:
        for minion in self._storage.minions(cluster):
            _until(
                lambda minion=minion: (
                    list(minion.run(query, f"SELECT moved_to FROM schemaless.shard_head {self._head}")) == [(moved_to,)]
                ),
                f"{minion.node.name} doesn't show that the shard moved to {moved_to}",
            )


def _until(condition, what: str) -> None:
    until(condition, lambda: what)
