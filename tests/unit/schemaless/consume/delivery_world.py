"""Two processes that follow the same shards: their group, the topic and the servers are in memory, and may be late.

Whatever is awaited can be held: a call of the handler, a page of the log, a move of a checkpoint. It ends when the test
says so, well or badly. A process never learns more than a real one: what its group tells it, and what it reads.
"""

import asyncio
from collections import defaultdict
from enum import Enum

from schemaless.consume.delivery import Delivery
from schemaless.consume.ports import Effect, Outcome, StatelessHandler
from schemaless.errors import StorageUnavailable
from schemaless.location import GenerationStart
from schemaless.shard_cursor import CursorState
from tests.unit.schemaless.consume.test_delivery import SHARDS, CheckpointTable, MemoryCheckpoints, MemoryLog

PROCESSES = 2


class Wait(Enum):
    """What a process awaits, and what can be held."""

    CALL = "call"
    READ = "read"
    MOVE = "move"


class Shared:
    """The log of each shard in all its generations, the topic, and the rows of one consumer.

    `wrong` says what must not happen, in the order in which it did. A process would only log an exception.
    """

    def __init__(self):
        self.log = MemoryLog()
        self.table = CheckpointTable()
        self.now = 0.0
        self.topic = {shard: [] for shard in SHARDS}
        self.histories = {shard: {1: []} for shard in SHARDS}
        self.finished = {shard: set() for shard in SHARDS}
        self.effects = {shard: set() for shard in SHARDS}
        self.counted_from = dict.fromkeys(SHARDS, 0)
        self.owner = {}
        self.wrong = []

    def put(self, shard, count):
        known = len(self.log.cells(shard))
        self.log.grow(shard, known + count)
        self.topic[shard] += self.log.cells(shard)[known:]
        self._keep(shard)

    def promote(self, shard, lost):
        starts_at = max(1, len(self.log.cells(shard)) - lost + 1)
        self.log.table.open_generation(shard, starts_at)
        self.topic[shard].append(GenerationStart(self.generation(shard), starts_at))
        self._keep(shard)

    def generation(self, shard):
        return self.log.table.history(shard)[0].generation

    def _keep(self, shard):
        self.histories[shard][self.generation(shard)] = self.log.cells(shard)

    def until(self, shard, location):
        """Returns the locations of the cells up to one, in the history that it belongs to."""
        cells = self.histories[shard][location.generation][: location.added_id]
        return [cell.location for cell in cells]

    def moved(self, advance):
        """I10: a checkpoint moves only over finished cells, and its count is the distance."""
        shard, to = advance.to.shard, advance.to.location
        kept = self.until(shard, to)
        if not self.finished[shard].issuperset(kept):
            self.wrong.append(f"the checkpoint of shard {shard} is at {to}, past a cell that nobody finished")
        if advance.restart:
            self.counted_from[shard] = to.added_id
        if self.table.counts[shard] != to.added_id - self.counted_from[shard]:
            self.wrong.append(f"{self.table.counts[shard]} cells of shard {shard} are counted at {to}")
        self.effects[shard].update(kept)


class Process(StatelessHandler):
    """One process: a delivery, the handler of its consumer, and the ends of its wires to servers and group."""

    foreign_code = None

    def __init__(self, shared, *, together, record_within_s):
        self.shared = shared
        self.together, self.record_within_s = together, record_within_s
        self.may_call, self.must_not_call = True, False
        self.held = set()
        self.lost = set()
        self.offsets = {shard: len(found) for shard, found in shared.topic.items()}
        self.taken_back = {}
        self.fails, self.finishes = set(), {}
        self._running = set()
        self._gates = defaultdict(list)
        self._checkpoints = MemoryCheckpoints(shared.table)
        self.consumer = self._checkpoints.consumer
        self.delivery = Delivery(
            self,
            self,
            _HeldLog(self),
            batch_cells_max=16,
            may_call=lambda: self.may_call,
            clock=lambda: shared.now,
        )
        self.task = asyncio.ensure_future(self._run())

    async def _run(self):
        while True:
            await self.delivery.step()
            await asyncio.sleep(0)

    def owned(self):
        return {shard for shard, process in self.shared.owner.items() if process is self}

    async def pass_gate(self, what):
        await asyncio.sleep(0)
        if what in self.fails:
            self.fails.discard(what)
            raise StorageUnavailable("this one fails")
        if what in self.held:
            gate = asyncio.get_running_loop().create_future()
            self._gates[what].append(gate)
            await gate

    def let_end(self, what, *, well):
        """Lets all of a kind end that were held, and holds no more."""
        self.held.discard(what)
        gates, self._gates[what] = self._gates[what], []
        for gate in gates:
            if gate.done():
                continue
            if well:
                gate.set_result(None)
            else:
                gate.set_exception(StorageUnavailable("it was held, and failed"))

    async def kill(self):
        """Ends it between two turns of its loop. Nothing that it had begun is finished."""
        tasks = [self.task, *self.delivery.calls]
        self.held, self.may_call = set(), False
        self.move = self.read = _away
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    # The checkpoints of its consumer

    async def read(self, shards):
        return await self._checkpoints.read(shards)

    async def move(self, advances, effects):
        await self.pass_gate(Wait.MOVE)
        lost = await self._checkpoints.move(advances, effects)
        self.lost |= lost
        for shard, advance in advances.items():
            if shard in lost or (lost and effects):
                continue
            if advance.restart and shard in self.taken_back:
                starts_at, generation = self.taken_back.pop(shard)
                gone = {at for at in self.shared.effects[shard] if at.generation < generation}
                self.shared.effects[shard] -= {at for at in gone if at.added_id >= starts_at}
            self.shared.moved(advance)
        return lost

    # The handler of its consumer

    async def handle(self, runs):
        for run in runs:
            self._begin(run)
        try:
            await self.pass_gate(Wait.CALL)
            return Effect([self._outcome(run) for run in runs])
        finally:
            self._running -= {run.shard for run in runs}

    async def supersede(self, shard, starts_at, generation):
        self.taken_back[shard] = starts_at, generation
        return Effect([])

    def _begin(self, run):
        shard = run.shard
        wrong = self.shared.wrong
        if shard in self._running:
            wrong.append(f"shard {shard} has two calls at once in one process")
        if shard in self.lost:
            wrong.append(f"shard {shard} is called, though its checkpoint was lost and the group not asked")
        if self.must_not_call:
            wrong.append(f"shard {shard} is called by a process that may be no member")
        self._running.add(shard)
        if run.cells and not self.shared.finished[shard].issuperset(self.shared.until(shard, run.after)):
            wrong.append(f"{run.cells[0].location} of shard {shard} is called before all cells below it are finished")
        added_ids = [cell.added_id for cell in run.cells]
        if added_ids != [*range(run.after.added_id + 1, run.after.added_id + len(run.cells) + 1)]:
            wrong.append(f"{added_ids} of shard {shard} are called after {run.after}")

    def _outcome(self, run):
        count = min(len(run.cells), self.finishes.pop(run.shard, len(run.cells)))
        self.shared.finished[run.shard].update(cell.location for cell in run.cells[:count])
        return Outcome(count)

    # What the topic and the group bring

    def hear(self, shard, count):
        """Brings the next records of the topic."""
        records = self.shared.topic[shard][self.offsets[shard] :][:count]
        self.offsets[shard] += len(records)
        cells = []
        for record in records:
            if isinstance(record, GenerationStart):
                if cells:
                    self.delivery.take(shard, cells)
                self.delivery.announce(shard, record.generation, record.starts_at)
                cells = []
            else:
                cells.append(record)
        if cells:
            self.delivery.take(shard, cells)

    def move_offset(self, shard, by):
        self.offsets[shard] = min(len(self.shared.topic[shard]), max(0, self.offsets[shard] + by))

    async def gain(self, shard, *, kept=False):
        """Gets a shard from the group. One that somebody may have had meanwhile begins anew."""
        self.shared.owner[shard] = self
        if not kept:
            await self.suspend(shard)  # a member that joins again loses what it believes to have
            self.lost.discard(shard)
            self.move_offset(shard, len(self.shared.topic[shard]))
        self.delivery.gain([shard], kept=kept)

    async def suspend(self, shard):
        """Suspends a shard. A rebalance that is cut short doesn't cut that short: the process goes on."""
        await asyncio.shield(asyncio.ensure_future(self.delivery.suspend([shard], 0.0)))

    def look(self):
        self.delivery.look(self.shared.log.heads())

    def confirm(self):
        """Asks the group for the shards that wait for it. It answers for those that are ours."""
        found = self.owned().intersection(self.delivery.unconfirmed())
        self.delivery.confirmed(found)
        self.lost -= {shard for shard in found if shard not in self.delivery.unconfirmed()}

    def learn(self):
        """Hears at last which shards aren't its own any longer."""
        self.delivery.release(set(SHARDS) - self.owned())

    def is_done(self, shard):
        """Whether it has finished all cells of the shard, and stored that."""
        is_live = self.delivery.cursors()[shard].state is CursorState.LIVE
        return is_live and self.shared.table.rows[shard][1].location == self.shared.log.cells(shard)[-1].location


async def _away(*_):
    raise StorageUnavailable("the process is dead")


class _HeldLog:
    def __init__(self, process):
        self._process = process

    async def read(self, wanted, limit):
        await self._process.pass_gate(Wait.READ)
        return await self._process.shared.log.read(wanted, limit)
