"""A batcher takes what arrives in the very moment in which its last lane ends."""

import asyncio

import pytest

from api.batcher import Batcher, BatchLimits


async def echo(items):
    await asyncio.sleep(0)
    return items


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("callers", [1, 3])
async def test_callers_that_come_again_at_once_are_never_left_waiting(lanes, callers):
    """A caller woken by its outcome submits before the lane's end is known: a new lane must still be started."""
    batcher = Batcher(echo, BatchLimits(lanes=lanes))

    async def call(number):
        return [await batcher.submit([(number, turn)], 1) for turn in range(20)]

    async with asyncio.timeout(5):
        answers = await asyncio.gather(*(call(number) for number in range(callers)))
    assert answers == [[[(number, turn)] for turn in range(20)] for number in range(callers)]
    await batcher.drain()
