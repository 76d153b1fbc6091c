"""The samples of fifteen minutes, and pictures that several pages share. Nothing here sleeps or asks a server."""

import asyncio
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from api.follow.followers import Follower
from api.ui import live
from api.ui.live import OpenPages, SampleHistory
from schemaless.access import issue, now_us
from schemaless.errors import StorageUnavailable, TooManyRequests
from schemaless.runtime.pace import Sampled
from schemaless.storage.shard_head import Movement
from schemaless.topology import Datastore

TRIPS = Datastore("trips", 1, 1, ("a",))


class Master:
    """Shows one sum of heads of `trips`, or doesn't answer."""

    def __init__(self):
        self.heads_sum = 0
        self.answers = True
        self.datastores = ("trips",)

    async def run(self, operation, **options):
        if not self.answers:
            raise StorageUnavailable("away")
        return {name: Movement(self.heads_sum, 1) for name in self.datastores}


@pytest.fixture
def masters():
    return {"a": Master(), "b": Master()}


@pytest.fixture
def clock(monkeypatch):
    """Five seconds pass with each sample, or as many as a test says."""
    passed = SimpleNamespace(step_s=5.0, now=0.0)

    def look():
        passed.now += passed.step_s
        return passed.now

    monkeypatch.setattr(live, "time", SimpleNamespace(monotonic=look, time=lambda: passed.now))
    return passed


@pytest.fixture
def history(masters, clock):
    storage = SimpleNamespace(
        topology=SimpleNamespace(clusters=dict.fromkeys(masters)), master=masters.__getitem__, nodes={"a1": 1, "b1": 2}
    )
    lag = SimpleNamespace(lag_s=float)
    breaker = SimpleNamespace(answers=lambda node: True)

    async def nothing():
        return {}

    return SampleHistory(storage, lag, breaker, Sampled(nothing, 5.0, []), Sampled(nothing, 5.0, {}))


async def rates(history, count):
    for _ in range(count):
        history.last = await history._add()
    return history.columns("trips")["rate"]


async def test_a_rate_is_what_the_heads_of_all_masters_grew(history, masters):
    """The first sample has none, because it has nothing to compare with."""
    assert await rates(history, 1) == [None]
    masters["a"].heads_sum, masters["b"].heads_sum = 20, 5
    assert await rates(history, 2) == [None, 5.0, 0.0]
    assert history.columns("trips")["servers"] == [2, 2, 2]
    assert history.columns("nowhere")["rate"] == []


async def test_a_rate_is_unknown_while_a_master_is_away(history, masters):
    """Half of the heads would look like half of the speed. What it got meanwhile is no burst when it is back."""
    await rates(history, 2)
    masters["b"].answers = False
    masters["a"].heads_sum = 50
    assert (await rates(history, 1))[-1] is None
    masters["b"].answers = True
    masters["b"].heads_sum = 100_000
    assert (await rates(history, 1))[-1] is None
    masters["b"].heads_sum = 0  # it was restored
    assert (await rates(history, 1))[-1] == 0.0


async def test_the_history_has_an_end(history, clock):
    """Fifteen minutes, also where a master that hangs makes samples rare."""
    assert len(await rates(history, 200)) == live.HISTORY_S / live.PERIOD_S == 180
    clock.step_s = 300.0
    await rates(history, 3)
    assert history.columns("trips")["at"] == [1300.0, 1600.0, 1900.0]


async def test_a_datastore_that_is_gone_has_no_history(history, masters):
    """It is gone once every master has answered without it."""
    masters["b"].datastores = ("trips", "old")
    await rates(history, 2)
    masters["b"].answers = False
    await rates(history, 1)
    assert len(history.columns("old")["at"]) == 3
    masters["b"].answers, masters["b"].datastores = True, ("trips",)
    await rates(history, 1)
    assert (history.columns("old")["at"], len(history.columns("trips")["at"])) == ([], 4)


def follower():
    return Follower(TRIPS, lambda shards: {}, (), asyncio.Event(), lambda: 0.0)


async def test_a_caller_may_hold_so_many_pages_open(monkeypatch):
    """Each may watch another shard, so each costs a look. Others aren't refused, and a closed page gives room."""
    monkeypatch.setattr(live, "PAGES_OF_A_CALLER_MAX", 2)
    flood, honest = (issue(name, ["*"], "read", "1h", now_us())[1] for name in ("flood", "honest"))
    pages = OpenPages()

    async def ask():
        return b"event"

    def opened(shard, token):
        return pages.watching(
            ("trips", "shard", shard),
            ask,
            Follower(TRIPS, lambda shards: {}, (), asyncio.Event(), lambda: 0.0, token),
        )

    with opened("1", flood):
        with opened("2", flood):
            with pytest.raises(TooManyRequests, match="2 pages are open with the token 'flood'"):
                opened("3", flood).__enter__()
            with opened("3", honest), opened("3", None):
                assert len(pages) == 4
        with opened("3", flood):
            assert len(pages) == 2
    with opened("1", None), opened("2", None), pytest.raises(TooManyRequests, match="without a token"):
        opened("3", None).__enter__()


async def turns():
    for _ in range(10):
        await asyncio.sleep(0)


async def test_pages_share_a_picture_until_the_last_one_is_closed():
    """One question for both, and none afterwards. Another view is another picture."""
    pages, asked = OpenPages(), []

    async def ask():
        asked.append(None)
        return b"event"

    one, other = follower(), follower()
    with pages.watching("overview", ask, one) as first:
        with pages.watching("overview", ask, other) as second, pages.watching("shards", ask, other) as third:
            assert (first is second, first is third, len(pages)) == (True, False, 3)
            assert await one.woken(5)
            assert await other.woken(5)
            assert (first.event, len(asked)) == (b"event", 2)
        assert len(pages) == 1
    assert len(pages) == 0
    await turns()
    assert len(asked) == 2
    assert len(asyncio.all_tasks()) == 1


async def test_pages_of_a_picture_that_failed_end():
    """Their browsers ask anew, and nobody looks at something that stands still."""

    async def ask():
        raise ValueError("a fault of ours")

    watching = follower()
    with OpenPages().watching("overview", ask, watching) as picture:
        assert not await watching.woken(5)
        assert (watching.is_released, picture.event) == (True, b"")


async def test_a_page_that_is_stuck_holds_no_picture_that_failed():
    """The next page has the picture asked for anew, and the stuck one takes nothing from it when it ends."""

    async def ask():
        raise ValueError("a fault of ours")

    async def ask_again():
        return b"event"

    pages, stuck, later = OpenPages(), follower(), follower()
    with ExitStack() as stuck_in_send:
        stuck_in_send.enter_context(pages.watching("overview", ask, stuck))
        await turns()
        with pages.watching("overview", ask_again, later) as picture:
            assert await later.woken(5)
            assert picture.event == b"event"
            stuck_in_send.close()
            assert len(pages) == 1


async def test_a_follower_that_nobody_wakes_hears_nothing():
    """Its stream sends a sign of life then."""
    waiting = follower()
    assert not await waiting.woken(0)
    waiting.wake()
    assert await waiting.woken(5)
    waiting.release()
    assert not await waiting.woken(5)
