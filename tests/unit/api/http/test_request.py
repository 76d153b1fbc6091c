"""Payloads: read within a bound each, and within a bound on all of a process together (I14)."""

import asyncio
from types import SimpleNamespace

import pytest

from api.http import request as http_request
from api.http.budget import PayloadBudget, ReadBudget, RequestsInFlight
from api.http.request import PAYLOAD_COMPLETE, Request
from schemaless.access import issue, now_us
from schemaless.errors import Malformed, TooLarge, TooManyRequests, Unavailable, UnsupportedMedia
from schemaless.runtime.loop_lag import TICK_S, LoopLag


def request(
    *messages, budget=None, headers=(), extensions=(), in_flight=None, address="10.0.0.1", token=None, reads=None
):
    """A request whose payload arrives as `messages`, and never more."""
    coming = iter(messages)

    async def receive():
        return next(coming)

    settings = SimpleNamespace(requests_max=2, behind_proxy=False)
    state = SimpleNamespace(
        settings=settings,
        storage=SimpleNamespace(loop_lag=LoopLag()),
        payload_budget=budget or PayloadBudget(100),
        read_budget=reads,
        in_flight=in_flight or RequestsInFlight(),
    )
    scope = {
        "type": "http",
        "method": "PUT",
        "headers": list(headers),
        "extensions": {key: {} for key in extensions},
        "client": (address, 1),
    }
    return Request(state, scope, receive, {}, token)


def part(body, more=True):
    return {"type": "http.request", "body": body, "more_body": more}


@pytest.mark.parametrize("extensions", [(), (PAYLOAD_COMPLETE,)])
async def test_a_payload_is_read_as_a_whole(extensions):
    """In one message or in many, with the server's word that all of it is there or without."""
    assert await request(part(b"all", more=False), extensions=extensions).payload(3) == b"all"
    assert await request(part(b"a"), part(b""), part(b"ll", more=False), extensions=extensions).payload(3) == b"all"
    assert await request({"type": "http.request"}, extensions=extensions).payload(3) == b""


@pytest.mark.parametrize(
    "messages", [[part(b"four", more=False)], [part(b"fo"), part(b"ur", more=False)], [part(b"four")]]
)
async def test_a_payload_over_the_bound_is_refused(messages):
    """As soon as that is seen: nothing more is received."""
    with pytest.raises(TooLarge):
        await request(*messages).payload(3)


async def test_an_announced_length_over_the_bound_is_refused_unread():
    """From the headers alone."""
    with pytest.raises(TooLarge):
        await request(headers=[(b"content-length", b"4")]).payload(3)


async def test_a_connection_that_ends_within_the_payload_is_malformed():
    """Half of a payload is never taken for a whole one."""
    with pytest.raises(Malformed):
        await request(part(b"a"), {"type": "http.disconnect"}).payload(3)


@pytest.mark.parametrize(("stood_s", "refusal"), [(0.0, Malformed), (10.0, Unavailable)])
async def test_a_payload_that_is_late_is_not_the_clients_fault_if_the_process_stood(monkeypatch, stood_s, refusal):
    """It may lie in the socket, and the client may send it again."""
    monkeypatch.setattr(http_request, "PAYLOAD_GRACE_S", 0.0)
    clock = iter([0.0, TICK_S, TICK_S + stood_s])
    made = request()
    made.state.storage.loop_lag = lag = LoopLag(lambda: next(clock))
    lag.tick()

    async def receive():
        await asyncio.Event().wait()

    made._receive = receive
    with pytest.raises(refusal):
        await made.payload(3)


async def test_long_payloads_share_a_budget_until_their_requests_finish():
    """A second one that doesn't fit is refused, and fits once the first one is answered."""
    budget = PayloadBudget(5)
    first = request(part(b"abc"), part(b"d", more=False), budget=budget)
    assert await first.payload(10) == b"abcd"
    second = request(part(b"ef"), budget=budget)
    with pytest.raises(Unavailable, match="too many large payloads at once"):
        await second.payload(10)
    second.finish()
    first.finish()
    first.finish()
    assert await request(part(b"abc"), part(b"de", more=False), budget=budget).payload(10) == b"abcde"


async def test_a_payload_that_never_comes_is_given_up(monkeypatch):
    """After its time-out."""
    monkeypatch.setattr(http_request, "PAYLOAD_TIMEOUT_S", 0.0)
    waiting = request()
    waiting._receive = asyncio.Event().wait
    with pytest.raises(Malformed, match="not there after"):
        await waiting.payload(3)


async def test_a_request_is_in_flight_when_its_payload_is_whole():
    """Slow payloads take no place of requests that are here, and what there is no room for then is refused."""
    in_flight = RequestsInFlight(count=1)
    slow = request(part(b"a"), part(b"ll", more=False), in_flight=in_flight)
    assert not slow.is_whole
    await slow.arrives()
    assert in_flight.count == 0
    assert await slow.payload(3) == b"all"
    assert in_flight.count == 1
    slow.finish()
    assert in_flight.count == 1
    late = request(part(b"all", more=False), in_flight=in_flight)
    in_flight.count += 1
    await late.arrives()
    in_flight.count += 2
    with pytest.raises(Unavailable, match="concurrent"):
        await late.payload(3)


async def test_a_token_has_half_of_the_places_when_its_payloads_are_whole():
    """Payloads that arrive take no place. So a token could send the heads first, and take all of them afterwards."""
    in_flight = RequestsInFlight()
    flood, honest = (issue(name, ["*"], "write", "1h", now_us())[1] for name in ("flood", "honest"))
    taken = [request(part(b"all", more=False), in_flight=in_flight, token=flood) for _ in range(2)]
    for one in taken:
        in_flight.begin(flood)
        await one.arrives()
    assert await taken[0].payload(3) == b"all"
    with pytest.raises(TooManyRequests, match="flood"):
        await taken[1].payload(3)
    other = request(part(b"all", more=False), in_flight=in_flight, token=honest)
    taken[1].finish()
    in_flight.end(flood)
    in_flight.begin(honest)
    await other.arrives()
    assert await other.payload(3) == b"all"


async def test_payloads_that_arrive_are_counted_by_address():
    """A thousand slow ones of one address leave places to everybody else, and to what is whole with its next part."""
    budget = PayloadBudget(100, arriving_max=3, caller_arriving_max=2)
    first, second = (request(budget=budget) for _ in range(2))
    await first.arrives()
    await second.arrives()
    with pytest.raises(TooManyRequests):
        await request(part(b"{"), budget=budget).arrives()
    small = request(part(b"{}", more=False), budget=budget)
    await small.arrives()
    assert await small.payload(2) == b"{}"
    await request(budget=budget, address="10.0.0.2").arrives()
    with pytest.raises(Unavailable):
        await request(part(b"{"), budget=budget, address="10.0.0.3").arrives()
    first.finish()
    await request(budget=budget).arrives()
    assert budget.arriving == 3


async def test_behind_a_proxy_an_address_is_nobody():
    """A27: one address is everybody there. The bound on all of them stays."""
    budget = PayloadBudget(100, arriving_max=2, caller_arriving_max=1)
    behind = [request(part(b"{"), budget=budget) for _ in range(3)]
    for one in behind:
        one.state.settings.behind_proxy = True
    for one in behind[:2]:
        await one.arrives()
    with pytest.raises(Unavailable):
        await behind[2].arrives()


async def test_payloads_with_a_token_are_counted_by_token():
    """Whatever address they come from, and whoever else comes from there."""
    flood, honest = (issue(name, ["*"], "write", "1h", now_us())[1] for name in ("flood", "honest"))
    budget = PayloadBudget(100, arriving_max=10, caller_arriving_max=2)
    await request(budget=budget, token=flood).arrives()
    await request(budget=budget, token=flood, address="10.0.0.2").arrives()
    with pytest.raises(TooManyRequests):
        await request(part(b"{"), budget=budget, token=flood, address="10.0.0.3").arrives()
    await request(budget=budget, token=honest).arrives()
    await request(budget=budget).arrives()


async def test_what_was_read_for_a_token_is_its_own_share():
    """A token that takes none of its responses leaves the others room, from the same address, too."""
    flood, honest = (issue(name, ["*"], "read", "1h", now_us())[1] for name in ("flood", "honest"))
    budget = ReadBudget(100, wait_s=0.0)
    await request(reads=budget, token=flood).read.reserve(50)
    with pytest.raises(Unavailable):
        await request(reads=budget, token=flood).read.reserve(1)
    await request(reads=budget, token=honest).read.reserve(50)


async def test_a_payload_has_a_least_rate(monkeypatch):
    """A byte now and then doesn't keep it: each byte buys its time, and none of them more than the deadline."""
    loop = asyncio.get_running_loop()
    deadlines = []
    monkeypatch.setattr(loop, "time", lambda: 100.0)
    monkeypatch.setattr(http_request, "PAYLOAD_BYTES_PER_S_MIN", 1000)
    monkeypatch.setattr(asyncio.Timeout, "reschedule", lambda self, when: deadlines.append(when))
    parts = [part(b"x"), part(b"x" * 999), part(b"x" * 99_000), part(b"", more=False)]
    await request(*parts, budget=PayloadBudget(1 << 20)).payload(1 << 20)
    assert [round(when, 3) for when in deadlines if when] == [105.0, 105.001, 106.0, 130.0]


def test_a_page_says_what_it_sends():
    """A browser lets any page send a form without asking us. A JSON type it asks about first (I17)."""
    origin = (b"origin", b"http://127.0.0.1:8000")
    with pytest.raises(UnsupportedMedia, match="needs a Content-Type"):
        request(headers=[origin]).request_format()
    request(headers=[origin, (b"content-type", b"application/json")]).request_format()
    request().request_format()
