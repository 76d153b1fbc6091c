"""A pair of clusters in memory: the buffer of the secondary, and what the servers of the home show."""

import hashlib
from collections import Counter
from types import SimpleNamespace

import msgspec

from cleaner.pair import ClusterPair, proven
from schemaless.cell import CellKey, ColumnName, RefKey, RowKey
from schemaless.codec import encode_body
from schemaless.errors import ClockAhead, Misconfigured, NotDurable, StorageUnavailable
from schemaless.storage import buffer_table, entity_table, erasure_table, refusal_table, shard_head
from schemaless.storage.asyncmy_driver import Traffic
from schemaless.storage.buffer_table import Buffered
from schemaless.storage.entity_table import ShardCell
from schemaless.storage.shard_head import Movement, ServerHistory
from schemaless.topology import Datastore

TRIPS = Datastore("trips", 4, 2, ("a",))
PAGE_ROWS = 3


def body(value):
    return encode_body({"n": value})


class Server:
    """The cells that one node of the home shows, by key. `asked` names its operations, and `looked_up` the keys that it
    was asked for. `error` is raised by everything, `rows_max` is how many cells it looks up within the time-out, and
    `refused` are keys that it doesn't store. One that is `lossy` takes nothing that must be durable.
    """

    def __init__(self, name):
        self.node = SimpleNamespace(name=name)
        self.cells = {}
        self.asked = []
        self.looked_up = []
        self.error = self.bodies_error = None
        self.rows_max = 1_000_000
        self.refused = set()
        self.slow = frozenset()  # keys for which the time never suffices
        self.lossy = False
        self.clock_us = 0
        self.server_id = 1

    async def run(self, operation, *args, timeout_s, traffic=Traffic.READ):
        is_proven = operation is proven
        operation, *args = args if is_proven else (operation, *args)
        if operation is erasure_table.covering and self.error is None:
            return [None] * len(args[1])
        return await self._answer(operation, args, traffic, is_proven=is_proven)

    async def _answer(self, operation, args, traffic, *, is_proven):
        if self.error is not None:
            self.asked.append(operation.__name__)
            raise self.error
        if operation is shard_head.server_history:
            return ServerHistory(self.server_id, {"trips": Movement(len(self.cells), 4)})
        self.asked.append(operation.__name__)
        keys = args[1]
        wanted = {cell.key if operation is entity_table.put_cells else cell[1] for cell in keys}
        if len(keys) > self.rows_max or self.slow & wanted:
            raise StorageUnavailable("no answer within 1.5 s")
        if operation is entity_table.put_cells:
            if self.refused & {cell.key for cell in keys}:
                raise Misconfigured("no table")
            if self.lossy and traffic is Traffic.WRITE:
                raise NotDurable("a1 may lose what it acknowledges")
            if len(args) < 3 or self.clock_us > args[2]:
                raise ClockAhead("a1's clock is ahead")
            self.cells |= {cell.key: cell.body for cell in keys}
            return None
        assert is_proven, "a former master would be believed"
        found = [self.cells.get(key) for _, key in keys]
        if operation is entity_table.digests:
            self.looked_up.append([key for _, key in keys])
            return [cell and hashlib.sha256(cell).digest() for cell in found]
        assert operation is entity_table.get
        if self.bodies_error is not None:
            raise self.bodies_error
        return [cell and SimpleNamespace(body=cell) for cell in found]


class Secondary:
    """The buffer, by id, the conflicts that were recorded, and the refusals by key. `looks_max` is how many rows it
    looks at within the time-out, those of other sizes included.
    """

    def __init__(self):
        self.node = SimpleNamespace(name="b1")
        self.rows = {}
        self.conflicts = []
        self.refusals = {}
        self.pages = 0
        self.looks_max = 1_000_000
        self.clock_us = 0
        self._newest = 0

    def add(self, value, size_bytes=None):
        self._newest = number = self._newest + 1
        key = CellKey(RowKey(number.to_bytes(16)), ColumnName("BASE"), RefKey(1))
        digest = hashlib.sha256(body(value)).digest()
        size_bytes = len(body(value)) if size_bytes is None else size_bytes
        self.rows[number] = (Buffered(number, "trips", 0, key, number, size_bytes, digest), body(value))
        return key

    async def run(self, operation, *args, timeout_s, traffic=Traffic.READ):
        if operation is shard_head.clock:
            return self.clock_us
        if operation is erasure_table.covering:
            return [None] * len(args[1])
        if operation is buffer_table.newest_id:
            return max(self.rows, default=0)
        if operation.__name__ == "_page":
            return self._page(operation.__self__, args[1])
        if operation is buffer_table.cells:
            return [ShardCell(row.key, self.rows[row.buffer_id][1], row.shard) for row in args[0]]
        if operation is buffer_table.delete_confirmed:
            return sum(self.rows.pop(row.buffer_id, None) is not None for row in args[0])
        if operation is refusal_table.note:
            self.refusals |= {row.key: reason for reason, rows in args[0].items() for row in rows}
            return None
        if operation is refusal_table.clear:
            for number in args[0]:
                del self.refusals[self.rows[number][0].key]
            return None
        assert operation is buffer_table.record_conflict
        row, stored, *_ = args
        self.conflicts.append((row.key, stored))
        return self.rows.pop(row.buffer_id, None) is not None

    def _page(self, cursor, until):
        self.pages += 1
        sizes, page_size, left, page = cursor._sizes, cursor.page_size, cursor.page_size.bytes, []
        asked = [(number, row) for number, (row, _) in sorted(self.rows.items()) if cursor.after < number <= until]
        for looks, (_, row) in enumerate(asked, start=1):
            if looks > self.looks_max:
                raise StorageUnavailable("no answer within 1.5 s")
            if sizes.least_bytes <= row.size_bytes <= sizes.most_bytes:
                left -= row.size_bytes
                if len(page) == page_size.rows or (page and left < 0):
                    break
                refused = row.key in self.refusals
                page.append(msgspec.structs.replace(row, was_refused=refused))
        return page


class World:
    """Home a with a master and a minion, secondary b, and the time."""

    def __init__(self):
        self.now = 1000.0
        self.arrivals = Counter()
        self.secondary, self.master, self.minion = Secondary(), Server("a1"), Server("a2")

    def clock(self):
        return self.now

    def pair(self):
        async def datastore(name):
            return TRIPS

        storage = SimpleNamespace(
            master=lambda cluster: {"a": self.master, "b": self.secondary}[cluster],
            minions=lambda cluster: [self.minion],
            epoch=lambda cluster: 1,
            placements={},
        )
        return ClusterPair(storage, SimpleNamespace(datastore=datastore), "b", "a", self.arrivals)

    async def passes(self, one, count=1):
        """Passes that are old enough for what is there now. The first one sees only what is newest."""
        await one.step()
        self.now += 10.0
        return [await one.step() for _ in range(count)][-1]
