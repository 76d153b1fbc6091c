"""Payloads: read within a bound each, and within a bound on all of a process together (I14)."""

import asyncio
from types import SimpleNamespace

import pytest

from api.http.request import PAYLOAD_COMPLETE, PayloadBudget, Request
from schemaless.errors import Malformed, TooLarge, Unavailable


def request(*messages, budget=None, headers=(), extensions=()):
    """A request whose payload arrives as `messages`, and never more."""
    coming = iter(messages)

    async def receive():
        return next(coming)

    settings = SimpleNamespace(payload_timeout_s=30.0)
    state = SimpleNamespace(settings=settings, payload_budget=budget or PayloadBudget(100))
    scope = {"type": "http", "method": "PUT", "headers": list(headers), "extensions": {key: {} for key in extensions}}
    return Request(state, scope, receive, {})


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


async def test_a_payload_that_never_comes_is_given_up():
    """After its time-out."""
    waiting = request()
    waiting.state.settings.payload_timeout_s = 0.0
    waiting._receive = asyncio.Event().wait
    with pytest.raises(Malformed, match="not there after"):
        await waiting.payload(3)
