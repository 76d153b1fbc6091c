"""A cell that waits is called when its time has come, whichever process has its shard then."""

import pytest

from schemaless import Retry, RetryPolicy, trigger
from schemaless.testing import TriggerKit
from tests.unit.schemaless.consume.parking_world import Order, Process, Server

ROW = "6ba7b810-9dad-11d1-80b4-00c04fd430c8"


def asking_for(delay_s, called):
    @trigger(column="BASE")
    def ask_later(cell):
        called.append(cell.ref_key)
        raise Retry(delay_s)

    return ask_later


@pytest.mark.parametrize("is_new", [True, False], ids=["another process", "the same one"])
async def test_a_function_that_asks_for_a_time_isnt_called_before(is_new):
    """A restart, a rebalance or a take-over calls nothing before its time, and at it everything."""
    server, called = Server(), []
    cells = [server.write(row) for row in range(20)]
    functions = [asking_for(300.0, called)]
    process = Process(server, 1, functions)
    await process.pass_by(5.0)
    assert called == cells
    for number in range(2, 5):
        if is_new:
            process = Process(server, number, functions)
        else:
            await process.delivery.suspend(server.checkpoints, 1.0)
            process.delivery.release(server.checkpoints)
            process.delivery.gain(server.checkpoints)
        await process.pass_by(40.0)
        assert called == cells
    await process.pass_by(200.0)
    assert called == cells * 2


async def test_the_pause_after_a_failure_survives_and_so_do_the_attempts():
    """Otherwise a restart in an outage of something would call everything at once."""
    server, called = Server(), []

    @trigger(column="BASE")
    def fail(cell):
        called.append(cell.ref_key)
        raise ValueError

    options = {"retry_delay_s": 60.0, "retry_delay_max_s": 60.0}
    bad = server.write(1)
    await Process(server, 1, [fail], **options).pass_by(20.0)
    await Process(server, 2, [fail], **options).pass_by(30.0)
    assert called == [bad]
    await Process(server, 3, [fail], **options).pass_by(12.0)
    assert called == [bad, bad]
    assert server.parked[bad].attempts == 2


async def test_an_order_makes_it_due_now():
    """People decide. The next time is the function's again."""
    server, called = Server(), []
    functions = [asking_for(300.0, called)]
    bad = server.write(1)
    await Process(server, 1, functions).pass_by(5.0)
    process = Process(server, 2, functions)
    await process.pass_by(5.0)
    server.order(bad, Order.RETRY)
    await process.pass_by(5.0)
    assert called == [bad, bad]
    await Process(server, 3, functions).pass_by(200.0)
    assert called == [bad, bad]


async def test_the_end_of_an_outage_calls_no_cell_that_asked_for_a_later_time():
    """The breaker's probes don't either."""
    server, called, is_down = Server(), [], []

    @trigger(column="BASE")
    def ask_or_fail(cell):
        called.append(cell.ref_key)
        if cell.body.get("asks"):
            raise Retry(300.0)
        if is_down:
            raise ConnectionError

    asks = server.write(0, body={"asks": True})
    process = Process(server, 1, [ask_or_fail])
    await process.pass_by(1.0)
    is_down.append(True)
    for row in range(1, 15):
        server.write(row)
    await process.pass_by(20.0)
    assert process.handler.tripped
    is_down.clear()
    await process.pass_by(20.0)
    assert not process.handler.tripped
    assert server.causes() == {asks: "waiting"}
    assert called.count(asks) == 1


async def test_outages_that_end_shorten_no_pause_of_a_row_that_failed_before():
    """Its attempts would be used up in no time by an outage that comes and goes, as that of a service with a limit."""
    server, called, is_down = Server(), [], []

    @trigger(column="BASE", retry=RetryPolicy(attempts=3, delay=60.0, backoff=1, jitter=0))
    def call(cell):
        called.append(cell.ref_key)
        if is_down or cell.body.get("bad"):
            raise ConnectionError

    bad = server.write(0, body={"bad": True})
    process = Process(server, 1, [call])
    await process.pass_by(1.0)
    for outage in range(5):
        is_down.append(True)
        rows = [server.write(100 * outage + row) for row in range(1, 15)]
        await process.pass_by(3.0)
        assert process.handler.tripped
        is_down.clear()
        await process.pass_by(7.0)
        assert not process.handler.tripped
        assert [row for row in rows if row not in called] == []
        assert server.parked[bad].attempts == 1, "what an outage is tried with counts for nothing"
    await process.pass_by(60.0)
    assert (server.causes()[bad], server.parked[bad].attempts) == ("waiting", 2)


async def test_what_failed_in_an_outage_is_called_at_its_end():
    """It waited for nothing else. Its next pause is as long as if the outage hadn't been."""
    server, called, is_down = Server(), [], [True]

    @trigger(column="BASE", retry=RetryPolicy(attempts=3, delay=60.0, backoff=1, jitter=0))
    def call(cell):
        called.append(cell.ref_key)
        if is_down:
            raise ConnectionError

    rows = [server.write(row) for row in range(15)]
    process = Process(server, 1, [call])
    await process.pass_by(10.0)
    assert process.handler.tripped
    is_down.clear()
    await process.pass_by(5.0)
    counted = [row for row in rows if server.causes().get(row)]
    assert len(counted) < 10, "those that failed before it was known to be an outage"
    assert {server.parked[row].attempts for row in counted} == {1}
    await process.pass_by(60.0)
    assert (server.parked, server.counts.called) == ({}, 15)


def test_the_kit_keeps_due_times_over_a_kill():
    """As a worker does."""
    called = []
    with TriggerKit([asking_for(300.0, called)]) as kit:
        kit.put(ROW, "BASE", {})
        kit.deliver()
        kit.kill()
        kit.advance(200.0)
        assert called == [1]
        kit.advance(101.0)
        assert called == [1, 1]
