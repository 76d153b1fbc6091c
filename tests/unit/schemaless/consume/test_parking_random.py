"""Random histories of a program: failures, kills, servers away, retries and discards, in every way of calling (I12)."""

import asyncio

import pytest

from schemaless import RetryPolicy, trigger
from tests.seed import seeded
from tests.unit.schemaless.consume.parking_world import Order, Process, Server

HISTORIES = 60
ALL_ROWS = 8


class History:
    """One program over some rows. `failures` says how often the call of a cell fails still."""

    def __init__(self, random):
        self.random, self.server, self.succeeded, self.discarded = random, Server(), [], set()
        count = random.randint(5, 60)
        self.cells = [(random.randint(1, ALL_ROWS), "BASE" if random.random() < 0.8 else "OTHER") for _ in range(count)]
        self.failures = {n: random.choice([1, 2, 3, 6, 99]) for n in range(1, count + 1) if random.random() < 0.25}
        self.parks = random.choice(["row", "row", "cell"])
        policy = RetryPolicy(attempts=random.choice([1, 2, 3]), delay=0.3, backoff=1, jitter=0)
        mark = trigger(column="BASE", name="f", retry=policy, park=self.parks)
        self.function = mark(random.choice([self.in_thread(), self.in_loop()]))
        self.options = {"parallel": random.choice([1, 1, 3]), "breaker": random.choice(["off", "probe"])}
        self.processes = 0

    def call(self, cell):
        if self.failures.get(cell.ref_key, 0) > 0:
            self.failures[cell.ref_key] -= 1
            raise ValueError(cell.ref_key)
        self.succeeded.append((cell.row_key.int, cell.ref_key))

    def in_thread(self):
        def call(cell):
            self.call(cell)

        return call

    def in_loop(self):
        async def call(cell):
            for _ in range(self.random.randint(0, 3)):
                await asyncio.sleep(0)
            self.call(cell)

        return call

    def start(self):
        self.processes += 1
        self.process = Process(self.server, self.processes, [self.function], **self.options)
        self.process.now += 1000 * self.processes

    def write(self, count):
        for row, column in self.cells[len(self.server.cells) :][:count]:
            self.server.write(row, column)

    async def go_on(self):
        """Lets one thing happen, and the process work for a while."""
        random, server = self.random, self.server
        what = random.choices(["write", "kill", "away", "order"], [50, 15, 7, 18])[0]
        if what == "write":
            self.write(random.randint(1, 12))
        elif what == "kill":
            await self.process.kill()
            if random.random() < 0.5:
                server.present.clear()  # it ended properly
            self.start()
        elif what == "away":
            server.is_away = True
            await self.process.pass_by(random.random(), steps=random.randint(1, 10))
            server.is_away = False
        elif parked := [n for n, cause in server.causes().items() if cause != "waiting"]:
            n, order = random.choice(parked), random.choice([Order.RETRY, Order.RETRY, Order.DISCARD])
            server.order(n, order)
            self.discarded |= {n} if order is Order.DISCARD else set()
        await self.process.pass_by(random.choice([0, 0, 0.05, 0.3, 1.5]), steps=random.randint(1, 20))

    async def end(self):
        """Repairs the program, and calls again what is parked, until nothing is."""
        self.write(len(self.cells))
        await self.process.pass_by(8)
        self.failures.clear()
        for _ in range(2):
            for n in self.server.causes():
                self.server.order(n, Order.RETRY)
            await self.process.pass_by(6)
        await self.process.kill()


@pytest.mark.parametrize("number", range(HISTORIES))
async def test_every_cell_is_called_or_discarded_in_its_rows_order_and_counted(number):
    """The counts add up at every move of the checkpoint, too (tests/unit/schemaless/consume/parking_world.py)."""
    history = History(seeded(f"parking {number}"))
    history.start()
    for _ in range(history.random.randint(3, 14)):
        await history.go_on()
    await history.end()
    server, called = history.server, [n for _, n in history.succeeded]
    wanted = {n for n, (_, column) in enumerate(history.cells, 1) if column == "BASE"}
    assert wanted - set(called) <= history.discarded
    assert (server.parked, server.position.added_id) == ({}, len(history.cells))
    assert (server.counts.parked, server.counts.waiting, server.counts.seen) == (0, 0, len(history.cells))
    assert min(server.counts.called, server.counts.skipped) >= 0
    for row in range(1, ALL_ROWS + 1) if history.parks == "row" else ():
        order = dict.fromkeys(n for key, n in history.succeeded if key == row and n not in history.discarded)
        assert list(order) == sorted(order)
