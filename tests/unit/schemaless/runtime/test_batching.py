"""Natural batching: what arrives while a flush is under way goes together; nobody pays for anybody else."""

import asyncio

import pytest

from schemaless.errors import Invalid, NodeRefuses, SchemalessError, StorageUnavailable, TableMissing, Unavailable
from schemaless.runtime.batching import REFUSED_FOR_S, Batcher, BatchLimits, chunks
from schemaless.runtime.pace import Pace


class Flusher:
    """Flushes when told to, and remembers its batches. Item -n is poison in a batch."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.open = asyncio.Event()
        self.under_way = 0
        self.under_way_most = 0
        self.error: SchemalessError | None = None

    async def __call__(self, items: list[int]) -> list[int]:
        self.batches.append(items)
        self.under_way += 1
        self.under_way_most = max(self.under_way, self.under_way_most)
        await self.open.wait()
        self.under_way -= 1
        if self.error is not None:
            raise self.error
        if any(item < 0 for item in items):
            raise Invalid("item", "is poison")
        return [item * 10 for item in items]


@pytest.fixture
def flusher():
    return Flusher()


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_an_idle_batcher_flushes_at_once(flusher):
    """A single item waits for nobody."""
    flusher.open.set()
    batcher = Batcher(flusher, BatchLimits())
    assert await batcher.submit([1], 1) == [10]
    assert flusher.batches == [[1]]


async def test_what_arrives_during_a_flush_goes_together(flusher):
    """The next batch collects while one is under way; each caller gets its own outcomes, in order."""
    batcher = Batcher(flusher, BatchLimits())
    first = batcher.submit([1], 1)
    await settled()
    others = [batcher.submit([n, n + 1], 2) for n in (2, 4, 6)]
    await settled()
    assert flusher.batches == [[1]]
    flusher.open.set()
    assert await asyncio.gather(first, *others) == [[10], [20, 30], [40, 50], [60, 70]]
    assert flusher.batches == [[1], [2, 3, 4, 5, 6, 7]]


async def test_a_lane_that_gathers_takes_what_is_submitted_a_moment_after_the_first(flusher):
    flusher.open.set()
    batcher = Batcher(flusher, BatchLimits(gather_s=0.02))
    first = batcher.submit([1], 1)
    await settled()
    second = batcher.submit([2], 1)
    assert [await first, await second] == [[10], [20]]
    assert flusher.batches == [[1, 2]]


async def test_what_arrives_in_a_pause_goes_together(flusher):
    """After a flush a lane waits as its pace says. What comes meanwhile shares the next flush."""
    flusher.open.set()
    batcher = Batcher(flusher, BatchLimits(), Pace(usual_min_s=1.0, pause_min_s=1.0, pause_max_s=1.0))
    await batcher.submit([1], 1)
    second = batcher.submit([2], 1)
    await settled()
    third = batcher.submit([3], 1)
    assert [await second, await third] == [[20], [30]]
    assert flusher.batches == [[1], [2, 3]]


async def test_a_pause_ends_when_a_large_batch_waits(flusher):
    """A pause gathers small batches. Where a large one waits already it would only cost time."""
    flusher.open.set()
    batcher = Batcher(
        flusher, BatchLimits(paced_bytes_max=100), Pace(usual_min_s=1.0, pause_min_s=1e9, pause_max_s=1e9)
    )
    await batcher.submit([1], 1)
    small = batcher.submit([2], 99)
    await settled()
    assert flusher.batches == [[1]]
    large = batcher.submit([3], 1)
    assert [await small, await large] == [[20], [30]]
    assert await batcher.submit([4, 5], 100) == [40, 50]
    small = batcher.submit([6], 1)
    await settled()
    assert flusher.batches == [[1], [2, 3], [4, 5]]


@pytest.mark.parametrize("limits", [BatchLimits(items_max=4), BatchLimits(bytes_max=4)], ids=["items", "bytes"])
async def test_batches_are_bounded_and_units_never_split(flusher, limits):
    """I14: a unit above the limits goes alone."""
    flusher.open.set()
    batcher = Batcher(flusher, limits)
    units = [[1, 2], [3], [4], [5], [6, 7, 8, 9, 10, 11], [12]]
    outcomes = await asyncio.gather(*(batcher.submit(unit, len(unit)) for unit in units))
    assert [item for outcome in outcomes for item in outcome] == [n * 10 for n in range(1, 13)]
    assert flusher.batches == [[1, 2, 3, 4], [5], [6, 7, 8, 9, 10, 11], [12]]


async def test_no_more_flushes_than_lanes(flusher):
    """As many at once as there are lanes, never more."""
    batcher = Batcher(flusher, BatchLimits(lanes=2, items_max=1))
    futures = [batcher.submit([n], 1) for n in range(1, 6)]
    await settled()
    assert flusher.under_way == 2
    flusher.open.set()
    await asyncio.gather(*futures)
    assert flusher.under_way_most == 2


@pytest.mark.parametrize(
    "limits", [BatchLimits(queued_units_max=3), BatchLimits(queued_bytes_max=30)], ids=["units", "bytes"]
)
async def test_a_full_queue_turns_away(flusher, limits):
    """I14: what waits is bounded; the caller may come again."""
    batcher = Batcher(flusher, limits)
    waiting = [batcher.submit([0], 10)]
    await settled()
    waiting += [batcher.submit([n], 10) for n in range(3)]
    with pytest.raises(Unavailable):
        batcher.submit([9], 10)
    flusher.open.set()
    await asyncio.gather(*waiting)
    assert await batcher.submit([9], 10) == [90]


async def test_only_the_guilty_one_fails(flusher):
    """A batch refused for one unit is tried unit by unit."""
    flusher.open.set()
    batcher = Batcher(flusher, BatchLimits())
    results = await asyncio.gather(*(batcher.submit([n], 1) for n in (1, -2, 3)), return_exceptions=True)
    assert (results[0], results[2]) == ([10], [30])
    assert isinstance(results[1], Invalid)


async def test_a_node_that_refuses_all_is_asked_a_few_times():
    """Each question costs round trips, and everybody behind waits."""
    asked = []

    async def refuse(items):
        asked.append(items)
        raise NodeRefuses("not now")

    batcher = Batcher(refuse, BatchLimits())
    first = [batcher.submit([n], 1) for n in range(100)]
    results = await asyncio.gather(*first, return_exceptions=True)
    assert {type(result) for result in results} == {NodeRefuses}
    assert len(asked) == 1 + 8


async def test_a_node_that_refused_all_is_left_alone_for_a_moment(monkeypatch):
    """Nine scripts for each batch would hold up what other shards write there. Then it is asked again."""
    loop = asyncio.get_running_loop()
    now = loop.time()
    monkeypatch.setattr(loop, "time", lambda: now)
    asked = []
    refuses = True

    async def write(items):
        asked.append(items)
        if refuses:
            raise NodeRefuses("not now")
        return items

    batcher = Batcher(write, BatchLimits())

    async def submit(count):
        return await asyncio.gather(*(batcher.submit([n], 1) for n in range(count)), return_exceptions=True)

    await submit(100)
    asked.clear()
    for _ in range(50):
        assert {type(result) for result in await submit(100)} == {NodeRefuses}
    assert asked == []
    now += REFUSED_FOR_S
    refuses = False
    assert await submit(3) == [[0], [1], [2]]
    assert asked == [[0, 1, 2]]


async def test_a_shard_that_lacks_its_table_keeps_no_other_one_out():
    """Eight units of it in a row say nothing about the next batch."""

    async def write(items):
        if any(item < 8 for item in items):
            raise TableMissing("no entity")
        return items

    batcher = Batcher(write, BatchLimits())
    refused = [batcher.submit([n], 1) for n in range(8)]
    await asyncio.gather(*refused, return_exceptions=True)
    assert await batcher.submit([8], 1) == [8]


async def test_a_shard_that_lacks_its_table_is_asked_a_few_times():
    """That holds for a kind of refusal, too, for which the node isn't left alone."""
    asked = []

    async def refuse(items):
        asked.append(items)
        raise TableMissing("no entity")

    batcher = Batcher(refuse, BatchLimits())
    results = await asyncio.gather(*(batcher.submit([n], 1) for n in range(100)), return_exceptions=True)
    assert {type(result) for result in results} == {TableMissing}
    assert len(asked) == 1 + 8


async def test_units_that_fail_otherwise_dont_hide_that_a_node_refuses():
    """A batch has cells of its own and copies for others. While the copies' breaker is open, the cells still count."""
    asked = []

    async def refuse(items):
        asked.append(items)
        raise NodeRefuses("not now") if len(items) > 1 or items[0] % 2 else StorageUnavailable("breaker open")

    batcher = Batcher(refuse, BatchLimits())
    await asyncio.gather(*(batcher.submit([n], 1) for n in range(100)), return_exceptions=True)
    assert sum(items[0] % 2 for items in asked) <= 9


async def test_a_server_that_is_away_fails_all_at_once(flusher):
    """Nothing is tried one by one where nobody answers."""
    flusher.open.set()
    flusher.error = StorageUnavailable("away")
    batcher = Batcher(flusher, BatchLimits())
    results = await asyncio.gather(*(batcher.submit([n], 1) for n in range(5)), return_exceptions=True)
    assert {type(result) for result in results} == {StorageUnavailable}
    assert len(flusher.batches) == 1


async def test_a_cancelled_caller_harms_nobody(flusher):
    """Waiting, its items are taken out; under way, the others get their outcomes."""
    batcher = Batcher(flusher, BatchLimits())
    under_way = [batcher.submit([n], 1) for n in (1, 2)]
    await settled()
    waiting = [batcher.submit([n], 1) for n in (3, 4)]
    under_way[0].cancel()
    waiting[0].cancel()
    flusher.open.set()
    assert await under_way[1] == [20]
    assert await waiting[1] == [40]
    assert flusher.batches == [[1, 2], [4]]


async def test_an_unforeseen_failure_leaves_nobody_waiting(flusher):
    """A bug in a flush is an error for its callers, not a silence."""

    async def broken(items):
        raise ZeroDivisionError

    batcher = Batcher(broken, BatchLimits(items_max=1))
    futures = [batcher.submit([n], 1) for n in range(3)]
    (lane,) = batcher._lanes
    for future in futures:
        with pytest.raises(Unavailable):
            await asyncio.wait_for(future, 5)
    with pytest.raises(ZeroDivisionError):
        await lane


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("callers", [1, 3])
async def test_callers_that_come_again_at_once_are_never_left_waiting(flusher, lanes, callers):
    """A caller woken by its outcome submits before the lane's end is known: a new lane must still be started."""
    flusher.open.set()
    batcher = Batcher(flusher, BatchLimits(lanes=lanes))

    async def call(number):
        return [await batcher.submit([number * 100 + turn], 1) for turn in range(20)]

    answers = await asyncio.gather(*(call(number) for number in range(callers)))
    assert answers == [[[(number * 100 + turn) * 10] for turn in range(20)] for number in range(callers)]
    await batcher.drain()


async def test_drain_waits_for_all(flusher):
    """Shutdown: everything that was taken gets its outcome first."""
    batcher = Batcher(flusher, BatchLimits(items_max=1))
    futures = [batcher.submit([n], 1) for n in range(5)]
    draining = asyncio.create_task(batcher.drain())
    await settled()
    assert not draining.done()
    flusher.open.set()
    await draining
    assert all(future.done() for future in futures)


@pytest.mark.parametrize("sizes", [[], [1], [1] * 1000, [40] * 3, [41, 1, 41], [30, 10, 1, 30, 20]])
@pytest.mark.parametrize(("count_max", "bytes_max"), [(None, 40), (7, None), (7, 40), (None, None)])
def test_chunks_keep_order_and_bounds(sizes, count_max, bytes_max):
    """I14: each chunk is within both bounds or holds one item; none is empty; together they are everything."""
    parts = list(chunks(sizes, count_max=count_max, bytes_max=bytes_max, size_bytes=lambda size: size))
    assert [size for part in parts for size in part] == sizes
    assert all(parts)
    assert all(len(part) <= (count_max or len(sizes)) for part in parts)
    assert all(len(part) == 1 or bytes_max is None or sum(part) <= bytes_max for part in parts)


def test_a_chunk_ends_only_where_the_next_item_does_not_fit():
    """Fewer chunks would break a bound."""
    assert list(chunks([30, 10, 1, 30, 20], bytes_max=40, size_bytes=lambda size: size)) == [[30, 10], [1, 30], [20]]
    assert list(chunks(range(5), count_max=2)) == [range(0, 2), range(2, 4), range(4, 5)]
