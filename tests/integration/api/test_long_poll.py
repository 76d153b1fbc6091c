"""Long polls: pages of one shard or of many that wait for their first cell."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from tests.integration.api.api_harness import assert_problem, row_in
from tests.integration.api.follow_harness import wait_for_followers

WAIT_S = 30
"""The longest wait there is. Who is answered in less did not wait to its end."""


@pytest.fixture
def datastore(make_datastore):
    return make_datastore(shards=4)


@pytest.fixture
def call(api, datastore):
    return api.at(datastore)


def put(call, datastore, shard=0, column="BASE"):
    return call.put(row_in(datastore, shard), 1, {"v": 1}, column=column).json()


@pytest.fixture
def once_waiting(api):
    """once_waiting(work) runs it beside the test as soon as somebody waits."""
    wait_for_followers(api, 0)
    with ThreadPoolExecutor(1) as pool:
        begun = []

        def begin(work):
            begun.append(pool.submit(lambda: (wait_for_followers(api, 1), work())))

        yield begin
        for done in begun:
            done.result()


def at_next(page):
    return "{generation}:{added_id}".format(**page["next"])


def timed(question):
    began = time.monotonic()
    answer = question()
    assert answer.status_code == 200, answer.text
    return answer.json(), time.monotonic() - began


@pytest.mark.parametrize("query", ["wait=30", "follow=true&wait=30", "follow=true&wait=30&limit=1"])
def test_a_page_waits_for_its_first_cell(call, datastore, once_waiting, query):
    """It is answered with the cell, soon after the put; what is there already is answered at once."""
    once_waiting(lambda: put(call, datastore))
    page, seconds = timed(lambda: call.get(f"/shards/0/cells?after=0&{query}"))
    assert [cell["added_id"] for cell in page["cells"]] == [1]
    assert (at_next(page), page["pending"]) == ("1:1", 0)
    assert seconds < WAIT_S
    page, seconds = timed(lambda: call.get(f"/shards/0/cells?after=0&{query}"))
    assert (len(page["cells"]), seconds < WAIT_S) == (1, True)


@pytest.mark.parametrize("start", ["after=1", "after=1:1", "after=end", "since=2999-01-01T00:00:00Z"])
def test_a_page_that_waited_in_vain_says_where_to_go_on(call, datastore, start):
    """After the wait, empty; its `next` is right for every kind of start."""
    put(call, datastore)
    page, seconds = timed(lambda: call.get(f"/shards/0/cells?{start}&wait=0.3"))
    assert (page["cells"], at_next(page), page["head"], page["pending"]) == ([], "1:1", 1, 0)
    assert 0.3 <= seconds < WAIT_S


def test_the_search_for_a_column_goes_on_while_it_waits(call, datastore, once_waiting):
    """Cells of other columns move `next` and end no wait."""
    once_waiting(lambda: put(call, datastore))
    page, seconds = timed(lambda: call.get("/shards/0/cells?columns=RARE&wait=0.8"))
    assert (page["cells"], page["next"]["added_id"], seconds >= 0.8) == ([], 1, True)
    once_waiting(lambda: (put(call, datastore), put(call, datastore, column="RARE")))
    page, seconds = timed(lambda: call.get("/shards/0/cells?after=1&columns=RARE&wait=30"))
    assert ([cell["added_id"] for cell in page["cells"]], page["next"]["added_id"]) == ([3], 3)
    assert seconds < WAIT_S


def test_a_long_poll_speaks_messagepack(call, datastore):
    """By Accept, with `follow` too."""
    put(call, datastore)
    headers = {"accept": "application/msgpack"}
    answer = call.get("/shards/0/cells?follow=true", headers=headers)
    assert answer.headers["content-type"] == "application/msgpack"
    assert at_next(msgspec.msgpack.decode(answer.content)) == "1:1"


def test_many_shards_are_waited_for_in_one_call(call, datastore, once_waiting):
    """The shard that got a cell has it, the others their empty pages with their own locations; and so on from there."""
    put(call, datastore, shard=1)
    locations = {"0": 0, "1": "1:1", "2": "end", "3": {"since": "2999-01-01T00:00:00Z"}}
    for shard in (2, 0, 3, 1):
        once_waiting(lambda shard=shard: put(call, datastore, shard))
        body = {"locations": locations, "wait": WAIT_S}
        shown, seconds = timed(lambda body=body: call.post("/shards/cells", json=body))
        assert seconds < WAIT_S
        pages = shown["shards"]
        assert {int(name) for name, page in pages.items() if page["cells"]} == {shard}
        assert all(page["pending"] == 0 for page in pages.values())
        locations = {name: "{generation}:{added_id}".format(**page["next"]) for name, page in pages.items()}
    assert locations == {"0": "1:1", "1": "1:2", "2": "1:1", "3": "1:1"}


def test_many_shards_are_not_waited_for_beside_a_problem_of_the_callers(call):
    """A location past the head, or a shard that isn't there, is told at once."""
    for wrong in ({"0": 9}, {"4": 0}, {"0": "7:0"}):
        body = {"locations": {"1": 0, "2": 0} | wrong, "wait": WAIT_S}
        shown, seconds = timed(lambda body=body: call.post("/shards/cells", json=body))
        assert seconds < WAIT_S
        assert sum("problem" in page for page in shown["shards"].values()) == 1


@pytest.mark.parametrize("wait", ["-1", "31", "x", "nan", "inf", ""])
def test_a_wait_out_of_range_is_refused(call, wait):
    """Seconds from 0 to 30, in a query and in a document."""
    assert_problem(call.get("/shards/0/cells", params={"wait": wait}), 422, "wait")
    assert_problem(call.post("/shards/cells", json={"locations": {"0": 0}, "wait": wait}), 422, "wait")


def test_a_shard_has_one_name(call):
    """7 is a shard, and 07 is none."""
    pages = call.post("/shards/cells", json={"locations": {"0": 0, "00": 1}}).json()["shards"]
    assert "cells" in pages["0"]
    assert pages["00"]["problem"]["status"] == 404


def test_a_caller_that_hangs_up_waits_no_more(api, call):
    """Its seat is free long before its wait is over."""
    wait_for_followers(api, 0)
    with socket.create_connection(("127.0.0.1", api.port), timeout=10) as opened:
        opened.sendall(f"GET {call.prefix}/shards/0/cells?wait=30 HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
        wait_for_followers(api, 1)
    wait_for_followers(api, 0)
