"""Who gets a slot for a transaction, and what a server that hangs keeps of them."""

import asyncio

import pytest

from tailer import partition_tail
from tailer.partition_tail import SLOW_PER_QUICK, TailerSlots
from tests.unit.tailer.test_owned_partition import until


@pytest.fixture(autouse=True)
def soon_slow(monkeypatch):
    monkeypatch.setattr(partition_tail, "SLOW_AFTER_S", 0.0)


async def hold(slots, taken, number, release):
    async with slots.taken():
        taken.append(number)
        await release.wait()


async def test_transactions_that_hang_leave_the_slots_to_others():
    """As many as there are slots hang for ever, and another one runs."""
    async with asyncio.TaskGroup() as tasks:
        slots, taken, hanging, done = TailerSlots(2), [], asyncio.Event(), asyncio.Event()
        for number in range(2):
            tasks.create_task(hold(slots, taken, number, hanging))
        await until(lambda: len(taken) == 2)
        done.set()
        await hold(slots, taken, "healthy", done)
        assert taken == [0, 1, "healthy"]
        hanging.set()


async def test_transactions_in_flight_are_bounded():
    """When all slots for slow ones are taken, the next one waits until a transaction ends. The longest waits least."""
    async with asyncio.TaskGroup() as tasks:
        slots, taken, hanging = TailerSlots(1), [], asyncio.Event()
        most = TailerSlots.threads_max(1)
        first = asyncio.Event()
        tasks.create_task(hold(slots, taken, 0, first))
        for number in range(1, most + 2):
            tasks.create_task(hold(slots, taken, number, hanging))
        await until(lambda: len(taken) == most)
        for _ in range(100):  # many turns of the loop, in which timers that are due ran
            await asyncio.sleep(0)
        assert taken == list(range(most))
        assert most == 1 + SLOW_PER_QUICK
        first.set()
        await until(lambda: len(taken) > most)
        assert taken == list(range(most + 1))
        hanging.set()


async def test_a_slot_comes_back_once():
    """Quick and slow transactions give back what they took, so later ones are bounded as the first ones were."""
    slots, done = TailerSlots(1), asyncio.Event()
    done.set()
    for _ in range(20):
        await hold(slots, [], 0, done)
        async with slots.taken():
            await until(lambda: slots._slow_free < SLOW_PER_QUICK)  # its timer moves it
    assert slots._quick._value == 1
    assert slots._slow_free == SLOW_PER_QUICK
