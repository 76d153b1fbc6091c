"""A trigger program in memory: a real delivery and a real handler over one shard's log, checkpoint and records.

Scripts of parked_table are carried out with the move of the checkpoint that they join, all or nothing.
"""

import asyncio
import re
import uuid
from datetime import UTC, datetime

import msgspec

from schemaless.cell import StoredCell
from schemaless.codec import encode_body
from schemaless.config import ConsumerSettings
from schemaless.consume.delivery import Delivery
from schemaless.consume.ports import Mark, Predecessor, ShardCheckpoint
from schemaless.consume.trigger_handler import TriggerHandler
from schemaless.consume.trigger_program import TriggerProgram
from schemaless.errors import StorageUnavailable
from schemaless.location import Location
from schemaless.position import BEGINNING_DIGEST, Position
from schemaless.shard_cursor import ProvenPage
from schemaless.storage.checkpoint_table import NO_COUNTS
from schemaless.storage.parked_table import _NAMES, Cause, Order, ParkedCell
from schemaless.storage.shard_head import Head
from schemaless.topology import Datastore
from schemaless.trigger import triggers_of

SHARD = 0


def row_key(n):
    return uuid.UUID(int=n)


class Server:
    """What MySQL holds. It outlives processes."""

    def __init__(self):
        self.cells = []
        self.version = 0
        self.position = Position(SHARD, 1, 0, digest=BEGINNING_DIGEST)
        self.counts, self.finished, self.counted_from = NO_COUNTS, 0, 0
        self.stopped = self.worker = None
        self.begun, self.kills = False, 0
        self.parked = {}
        self.present = set()
        self.is_away = False
        self.orders = 0

    def write(self, row, column="BASE", body=None):
        """Adds a cell to the log, and returns its added_id."""
        n = len(self.cells) + 1
        self.cells.append(
            StoredCell(row_key(row).bytes, column, n, SHARD, 1, n, 1_000_000, encode_body(body or {"n": n}))
        )
        return n

    def run_script(self, script):
        for statement in filter(None, script.split(";")):
            if statement.startswith("INSERT INTO schemaless.parked"):
                values = [
                    _value(text) for text in re.search(r"VALUES \((.*?)\) ON DUPLICATE", statement)[1].split(", ")
                ]
                found = dict(zip(_NAMES, values[2:], strict=True))
                found["attempted_at"] = msgspec.json.decode(found["attempted_at"])
                found["cause"] = Cause(found["cause"])
                for name in ("holds_row", "begun"):
                    found[name] = bool(found[name])
                self.parked[found["added_id"]] = ParkedCell(**found)
                continue
            added_id = int(re.search(r"added_id = (\d+)", statement)[1])
            if statement.startswith("DELETE"):
                self.parked.pop(added_id, None)
            else:
                name, value = re.search(r"SET (\w+) = (\d)", statement).groups()
                self.parked[added_id] = msgspec.structs.replace(self.parked[added_id], **{name: value == "1"})

    def order(self, added_id, order):
        """A person orders something for a record."""
        self.orders += 1
        self.parked[added_id] = msgspec.structs.replace(self.parked[added_id], ordered=order, due_at=self.orders)

    def causes(self):
        return {added_id: record.cause.value for added_id, record in sorted(self.parked.items())}


def _value(text):
    if text.startswith("_utf8mb4 x'"):
        return bytes.fromhex(text[11:-1]).decode()
    if text.startswith("x'"):
        return bytes.fromhex(text[2:-1])
    if text.startswith("'"):
        moment = datetime.strptime(text[1:-1], "%Y-%m-%d %H:%M:%S.%f").replace(tzinfo=UTC)
        return round(moment.timestamp() * 1_000_000)
    return None if text == "NULL" else int(text)


class Process:
    """One worker. It implements the ports over the server."""

    consumer = "trigger:test"

    def __init__(self, server, number, functions, **options):
        self.server, self.number, self.known, self.now = server, number, None, 100.0
        by_column = {}
        for found in triggers_of({str(n): function for n, function in enumerate(functions)}):
            by_column.setdefault(found.column, []).append(found)
        settings = ConsumerSettings(
            topology="unused", kafka="", **{"retry_delay_s": 1.0, "retry_delay_max_s": 1.0, "attempts_max": 3} | options
        )
        clock = lambda: self.now  # noqa: E731
        self.handler = TriggerHandler(
            TriggerProgram("test", by_column, "v1"), Datastore("d", 1, 1, ("a",)), settings, self, clock,
            lambda: int(self.now * 1e6),
        )  # fmt: skip
        self.delivery = Delivery(self.handler, self, self, batch_cells_max=8, clock=clock)
        server.present.add(number)
        self.look()
        self.delivery.gain([SHARD])

    def look(self):
        self.delivery.look({SHARD: Head(SHARD, 1, len(self.server.cells), 0)})

    async def pass_by(self, seconds, steps=40):
        """Lets the process work for so many seconds, and carries out orders that are due."""
        end = self.now + seconds
        for _ in range(10_000):
            self.look()
            self.handler.order([r for r in self.server.parked.values() if r.ordered is not None])
            pause_s = 0.05
            for _ in range(steps):
                pause_s = await self.delivery.step()
                await asyncio.sleep(0)
                if self.delivery._calls:
                    await asyncio.wait(self.delivery._calls, timeout=0.2)
                    pause_s = 0.0
                elif pause_s > 0.0:
                    break
            if self.now >= end:
                return
            self.now += max(0.01, min(pause_s, 0.25))

    async def kill(self):
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    # CheckpointStore

    async def read(self, wanted, limit=None):
        self._require_server()
        if limit is not None:
            return self._pages(wanted, limit)
        server = self.server
        self.known = server.version
        died = server.worker in server.present and server.worker != self.number
        ours = server.worker == self.number
        predecessor = Predecessor.OURSELVES if ours else Predecessor.DIED if died else Predecessor.LEFT
        kills = server.kills + (died and server.begun)
        return {SHARD: ShardCheckpoint(server.position, server.stopped, (), predecessor, kills, server.counted_from)}

    async def move(self, advances, effects):
        self._require_server()
        server, advance = self.server, advances[SHARD]
        if server.version != self.known:
            return frozenset([SHARD])
        self.known = server.version = server.version + 1
        server.position, server.stopped, server.worker = advance.to, advance.stop_reason, self.number
        server.counted_from = advance.to.added_id if advance.restart else server.counted_from
        server.finished = 0 if advance.restart else server.finished + advance.finished
        server.counts = NO_COUNTS if advance.restart else server.counts + advance.counts
        mark = advance.mark or Mark(begun=False)
        server.begun, server.kills = mark.begun, mark.kills
        server.run_script(advance.effect)
        assert server.counts.seen == server.finished, "the counts don't add up"
        return frozenset()

    async def give_away(self, shards):
        self.server.worker, self.server.begun = None, False

    # Log and ParkedStore

    def _pages(self, wanted, limit):
        (position,) = wanted.values()
        after = position.added_id
        return {SHARD: ProvenPage(self.server.cells[after : after + limit], Location(1, len(self.server.cells)))}

    async def of_shards(self, shards):
        self._require_server()
        return {SHARD: [self.server.parked[n] for n in sorted(self.server.parked)]}

    async def of_row(self, shard, row_key, columns, after, until):
        self._require_server()
        found = [c for c in self.server.cells if c.row_key == row_key and c.column_name in columns]
        return [c for c in found if after < c.added_id <= until][:3]

    def _require_server(self):
        if self.server.is_away:
            raise StorageUnavailable("the server is away")


__all__ = ["SHARD", "Order", "Process", "Server", "row_key"]
