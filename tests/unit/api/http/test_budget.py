"""What a process holds for clients that don't take their responses is bounded (I14), and one leaves others room."""

import asyncio

import pytest

from api.http.budget import Held, ReadBudget
from schemaless.errors import TooLarge, Unavailable


def budget(bytes_max=100, wait_s=60.0):
    return ReadBudget(bytes_max, wait_s=wait_s)


async def test_more_than_is_left_waits_until_it_is_given_back():
    """In order: a small request doesn't overtake a large one for ever."""
    everything = budget()
    await everything.take(80, "a")
    order = []

    async def ask(count, peer):
        await everything.take(count, peer)
        order.append(count)

    tasks = [asyncio.ensure_future(ask(60, "b")), asyncio.ensure_future(ask(10, "c"))]
    await asyncio.sleep(0)
    assert order == []
    everything.give_back(80, "a")
    await asyncio.gather(*tasks)
    assert order == [60, 10]
    assert everything.held_bytes == 70


async def test_small_ones_dont_keep_a_large_one_waiting():
    """What is given back in pieces is kept for whoever waits first."""
    everything = budget()
    for _ in range(10):
        await everything.take(10, "a" if everything.held_bytes < 50 else "b")
    large = asyncio.ensure_future(everything.take(40, "c"))
    await asyncio.sleep(0)
    small = [asyncio.ensure_future(everything.take(10, "d")) for _ in range(4)]
    await asyncio.sleep(0)
    for caller in "aaab":
        assert not large.done()
        everything.give_back(10, caller)
        await asyncio.sleep(0)
    assert [large.done(), *(one.done() for one in small)] == [True, False, False, False, False]
    large.cancel()
    for one in small:
        one.cancel()


async def test_who_gives_up_waiting_lets_those_behind_it_in():
    """There was room for them all the time."""
    everything = budget()
    await everything.take(80, "a")
    large = asyncio.ensure_future(everything.take(40, "b"))
    await asyncio.sleep(0)
    small = asyncio.ensure_future(everything.take(10, "c"))
    await asyncio.sleep(0)
    assert not small.done()
    large.cancel()
    await small
    assert everything.held_bytes == 90


async def test_who_waits_for_a_share_of_its_own_holds_up_nobody():
    """It has not all of its share, and asks for more than is left of it."""
    everything = budget()
    await everything.take(40, "a")
    own = asyncio.ensure_future(everything.take(20, "a"))
    await asyncio.sleep(0)
    await asyncio.wait_for(everything.take(20, "b"), 1)
    assert not own.done()
    own.cancel()


async def test_an_address_holds_half():
    """Whoever takes nothing of its responses leaves the others room, and nobody waits behind it."""
    everything = budget(wait_s=0.0)
    await everything.take(50, "a")
    assert not everything.take_now(1, "a")
    with pytest.raises(Unavailable):
        await everything.take(1, "a")
    await everything.take(40, "b")
    assert everything.held_bytes == 90


async def test_a_proxy_is_no_address():
    """Behind one, only the bound of all holds."""
    everything = budget()
    await everything.take(100, "")
    assert not everything.take_now(1, "")


async def test_who_waits_in_vain_holds_nothing():
    """Neither after the time is over, nor when the request is cancelled, also as its turn comes."""
    everything = budget(wait_s=0.0)
    await everything.take(100, "a")
    with pytest.raises(Unavailable):
        await everything.take(10, "b")
    patient = budget()
    await patient.take(100, "a")
    task = asyncio.ensure_future(patient.take(10, "b"))
    await asyncio.sleep(0)
    patient.give_back(100, "a")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert patient.held_bytes == 0
    assert everything.held_bytes == 100


async def test_what_is_larger_than_the_budget_fits_an_empty_one():
    """A bound that is set too low makes one request wait for the other, and none fail."""
    everything = budget()
    await everything.take(1000, "a")
    everything.give_back(1000, "a")
    assert everything.held_bytes == 0


async def test_a_response_replaces_what_was_read_for_it():
    """It may be larger only where there is room. One may pass the bound, and no other meanwhile."""
    everything = budget()
    held = Held(everything, "a")
    await held.reserve(30)
    assert held.resize(10)
    assert everything.held_bytes == 10
    other = Held(everything, "b")
    await other.reserve(45)
    assert held.resize(60)
    assert held.resize(61)
    assert not other.resize(46)
    assert everything.held_bytes == 106
    assert held.resize(50)
    assert other.resize(51)
    assert not held.resize(51)
    assert held.resize(0)
    assert other.resize(0)
    assert everything.held_bytes == 0


@pytest.mark.parametrize("parts", [(1, 16), (1, 4, 16), (1, 4, 5, 6, 16)])
@pytest.mark.parametrize("callers", [1, 2, 7])
async def test_requests_that_hold_a_part_have_their_turn(callers, parts):
    """They hold all together, and each needs more to end, once or several times. At most one passes the bound."""
    everything = budget(bytes_max=96)
    most = 0

    async def grows(number):
        nonlocal most
        held = Held(everything, f"token {number % callers}")
        for part in parts:
            await held.reserve(part)
            most = max(most, everything.held_bytes)
            await asyncio.sleep(0)
        held.resize(0)

    await asyncio.gather(*(grows(number) for number in range(96)))
    assert everything.held_bytes == 0
    assert most <= (48 if callers == 1 else 96) + 15


async def test_a_piece_that_is_larger_than_the_budget_may_grow():
    """It is alone, so it would wait for itself."""
    everything = budget()
    held = Held(everything, "a")
    await held.reserve(1000)
    assert held.resize(1001)
    assert not everything.take_now(1, "b")
    assert held.resize(0)


async def test_who_passed_the_bound_is_no_exception_later():
    """Others gave back enough, and another one passed it. Two would be more than one response over the bound."""
    everything = budget(wait_s=0.0)
    first, second, third = (Held(everything, caller) for caller in "abc")
    for held in (first, second, third):
        await held.reserve(30)
    assert first.resize(50)
    assert everything.held_bytes == 110
    assert third.resize(10)
    assert second.resize(60)
    assert not first.resize(51)
    with pytest.raises(Unavailable):
        await first.reserve(51)
    assert second.resize(61)


async def test_who_holds_a_part_goes_before_who_holds_nothing():
    """What it waits for is held by others like it, who would wait for it behind the other one."""
    everything = budget()
    grown, large = Held(everything, "a"), Held(everything, "b")
    await grown.reserve(40)
    await large.reserve(40)
    assert large.resize(70)
    waiting = asyncio.ensure_future(everything.take(30, "c"))
    await asyncio.sleep(0)
    more = asyncio.ensure_future(grown.reserve(60))
    await asyncio.sleep(0)
    large.resize(50)
    await more
    assert not waiting.done()
    waiting.cancel()


@pytest.fixture
async def later(monkeypatch):
    """Lets seconds pass on the loop's clock at once."""
    loop = asyncio.get_running_loop()
    began, passed = loop.time(), [0.0]
    monkeypatch.setattr(loop, "time", lambda: began + passed[0])

    async def passes(seconds):
        passed[0] += seconds
        for _ in range(5):
            await asyncio.sleep(0)

    return passes


async def test_a_queue_that_moves_is_worth_waiting_in(later):
    """Each that is let in prolongs the time of those behind it, but not for ever."""
    everything = budget(wait_s=1.0)
    await everything.take(100, "a")
    waiting = [asyncio.ensure_future(everything.take(100, "a")) for _ in range(9)]
    await asyncio.sleep(0)
    for _ in range(5):
        await later(0.9)
        everything.give_back(100, "a")
        await asyncio.sleep(0)
    await later(0.9)
    ends = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(end) for end in ends] == [type(None)] * 5 + [Unavailable] * 4


async def test_a_queue_that_stands_still_is_left(later):
    """Whoever takes nothing of its responses isn't waited for."""
    everything = budget(wait_s=1.0)
    await everything.take(100, "a")
    waiting = asyncio.ensure_future(everything.take(100, "a"))
    await asyncio.sleep(0)
    await later(1.1)
    assert isinstance(waiting.exception(), Unavailable)


async def test_what_was_too_little_is_free_while_its_request_waits_for_more():
    """Nothing of it is left in memory."""
    everything = budget(bytes_max=1 << 20)

    async def read(bytes_max):
        if bytes_max < 1 << 19:
            raise TooLarge("more than that")

    await everything.take(700 << 10, "a")
    large = asyncio.ensure_future(Held(everything, "b").read(1 << 19, read))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert everything.held_bytes == 700 << 10
    everything.give_back(700 << 10, "a")
    await large


async def test_small_reads_of_one_address_dont_wait_for_one_another():
    """Each reserves what is usual, not the most that it may read. A large one then reserves all, and reads again."""
    everything = budget(bytes_max=96 << 20, wait_s=0.0)
    answers = asyncio.Event()
    bounds = []

    async def read(bytes_max):
        bounds.append(bytes_max)
        await answers.wait()
        return bytes_max

    async def read_large(bytes_max):
        if bytes_max < 1 << 20:
            raise TooLarge("more than that")
        return bytes_max

    small = [asyncio.ensure_future(Held(everything, "a").read(16 << 20, read)) for _ in range(64)]
    await asyncio.sleep(0)
    assert len(bounds) == 64
    answers.set()
    await asyncio.gather(*small)
    assert await Held(everything, "a").read(16 << 20, read_large) == 16 << 20
