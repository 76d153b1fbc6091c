"""Following a shard over HTTP: the stream of events, from any start, through generations, idle and resumed."""

import time

import pytest

from schemaless.ops.tailers import set_paused
from tests.integration.api.api_harness import api_process, assert_problem, row_in
from tests.integration.api.follow_harness import EVENTS, following, wait_for_followers
from tests.integration.api.test_log import open_generation
from tests.log_harness import restore

HEARTBEAT_S = 0.5


@pytest.fixture(scope="module")
def quick(running, api):
    """An API process whose streams soon say that they have nothing to say."""
    with api_process(running.path, heartbeat_s=HEARTBEAT_S, followers_max=4) as started:
        yield started


@pytest.fixture
def datastore(make_datastore):
    return make_datastore(shards=2)


@pytest.fixture
def call(quick, datastore):
    return quick.at(datastore)


def put(call, datastore, count, column="BASE", shard=0):
    return [call.put(row_in(datastore, shard), 1, {"n": n}, column=column).json() for n in range(count)]


def test_a_stream_begins_at_the_beginning_and_goes_on_with_what_comes(call, datastore):
    """History first, then each cell as it is put, within a moment; as the log's pages show it, with its location."""
    put(call, datastore, 25)
    with following(call, limit=7) as stream:
        assert stream.answer.headers["schemaless-served-by"] == "master"
        assert stream.answer.headers["cache-control"] == "no-store"
        assert stream.added_ids(25) == list(range(1, 26))
        for expected in range(26, 30):
            (stored,) = put(call, datastore, 1)
            event = stream.next("cell")
            assert event.id == "1:{added_id}:{digest}".format(**stored)
            assert event.location == f"1:{expected}"
            (shown,) = call.get("/shards/0/cells", params={"after": expected - 1}).json()["cells"]
            assert event.data == shown


STARTS = {
    "an added_id": ({"after": 3}, [4, 5]),
    "a location": ({"after": "1:4"}, [5]),
    "a time long ago": ({"since": "1999-01-01T00:00:00Z"}, [1, 2, 3, 4, 5]),
    "a time to come": ({"since": "2999-01-01T00:00:00Z"}, []),
    "the end": ({"after": "end"}, []),
}


@pytest.mark.parametrize("kind", STARTS)
def test_a_stream_begins_where_it_is_told(call, datastore, kind):
    """After a location, at a time, or at the end; then what is put."""
    put(call, datastore, 5)
    query, history = STARTS[kind]
    with following(call, **query) as stream:
        if not history:
            heartbeat = stream.next()
            assert (heartbeat.kind, heartbeat.location) == (
                "heartbeat",
                "1:5",
            )  # where it began, should it be cut off now
        assert stream.added_ids(len(history)) == history
        put(call, datastore, 1)
        assert stream.added_ids(1) == [6]


def test_last_event_id_goes_before_after(call, datastore):
    """A reader that comes back with its old address and the id of the last event goes on after that event."""
    put(call, datastore, 5)
    with following(call, after=1) as stream:
        last = [stream.next() for _ in range(2)][-1]
    with following(call, after=1, headers={"last-event-id": last.id}) as stream:
        assert stream.added_ids(2) == [4, 5]


def test_an_idle_stream_has_heartbeats(call, datastore):
    """Each after the pause, with the position as id and in its data; a cell in between puts the next one off."""
    put(call, datastore, 2)
    with following(call) as stream:
        stream.cells(2)
        began = time.monotonic()
        beats = [stream.next() for _ in range(2)]
        assert time.monotonic() - began > HEARTBEAT_S
        assert [(beat.kind, beat.location) for beat in beats] == [("heartbeat", "1:2")] * 2
        assert beats[0].data == {"generation": 1, "added_id": 2, "head": 2}


def test_heartbeats_carry_on_the_position_of_a_reader_of_a_rare_column(call, datastore):
    """It is told how far the log was searched, so it comes back near the end and not where its last cell was."""
    put(call, datastore, 1, column="RARE")
    with following(call, columns="RARE,OTHER") as stream:
        assert stream.added_ids(1) == [1]
        put(call, datastore, 30)
        while (beat := stream.next("heartbeat")).data["added_id"] < 31:
            assert beat.data["head"] <= 31
        assert (beat.location, beat.data["head"]) == ("1:31", 31)
        put(call, datastore, 1, column="OTHER")
        assert stream.next("cell").location == "1:32"


def test_a_stream_ends_where_another_cell_took_the_place(call, datastore, storage):
    """A restored master grew again: nothing of it is sent after the cells that the reader has, nor later (I16)."""
    put(call, datastore, 3)
    with following(call) as stream:
        stream.cells(2)
        last = stream.next("cell")
        restore(storage.master(datastore.home(0)), datastore, 0, 2)
        put(call, datastore, 2)
        problem = stream.next("problem")
        assert (problem.data["status"], problem.data["head"], problem.data["resume_at"]) == (409, 4, 0)
        assert "another cell is at 1:3" in problem.data["detail"]
    gone = call.get("/shards/0/cells?follow=true", headers=EVENTS | {"last-event-id": last.id})
    assert "another history" in assert_problem(gone, 409)["detail"]
    with following(call, headers={"last-event-id": last.location}) as stream:
        assert stream.added_ids(1) == [4], "without a digest nothing can be compared"


def test_a_generation_that_goes_on_is_told_in_the_stream(call, datastore, storage):
    """At once, also before it has a cell, and once; its id is a location to resume from (I13)."""
    put(call, datastore, 3)
    with following(call, after=2) as stream:
        assert stream.next("cell").location == "1:3"
        storage.master(datastore.home(0)).run(open_generation, datastore.name, 0)
        told = stream.next("generation")
        assert (told.location, told.data) == ("2:3", {"generation": 2, "starts_at": 4})
        assert stream.next().location == "2:3"
        put(call, datastore, 1)
        assert stream.next("cell").location == "2:4"
    with following(call, headers={"last-event-id": told.id}) as stream:
        assert stream.next().location == "2:4"
    with following(call, after="1:2") as stream:
        assert [stream.next().kind for _ in range(3)] == ["cell", "generation", "cell"]


def test_a_superseded_follower_is_told_and_sent_away(call, datastore, storage):
    """A promotion that lost its last cells: a problem event with where to go on, then the end; later a 409 (I13)."""
    put(call, datastore, 3)
    with following(call) as stream, following(call, columns="OTHER") as other:
        stream.cells(3)
        while other.next("heartbeat").data["added_id"] < 3:
            pass
        storage.master(datastore.home(0)).run(lose_after, datastore, 2)
        for reader in (stream, other):
            problem = reader.next("problem")
            assert problem.id is None
            assert (problem.data["status"], problem.data["resume_at"], problem.data["generation"]) == (409, 2, 2)
            with pytest.raises(StopIteration):
                reader.next()
    gone = call.get("/shards/0/cells?follow=true", headers=EVENTS | {"last-event-id": "1:3"})
    assert assert_problem(gone, 409)["resume_at"] == 2
    with following(call, after=problem.data["resume_at"]) as stream:
        put(call, datastore, 1)
        assert stream.next("cell").location == "2:3"


def lose_after(datastore, kept):
    """What a promotion to a minion that didn't have all leaves behind."""
    yield (
        f"DELETE FROM {datastore.database(0)}.entity WHERE added_id > {kept};"
        f"INSERT INTO schemaless.shard_generation VALUES ('{datastore.name}', 0, 2, {kept + 1}, UTC_TIMESTAMP(6));"
        f"UPDATE schemaless.shard_head SET generation = 2, head = {kept}"
        f" WHERE datastore = '{datastore.name}' AND shard = 0"
    )


def test_a_follower_of_a_paused_datastore_goes_on(call, datastore, storage):
    """Pausing stops what is published; the log API reads MySQL."""
    set_paused(storage, datastore.name, True)
    with following(call) as stream:
        put(call, datastore, 3)
        assert stream.added_ids(3) == [1, 2, 3]


def test_many_readers_see_all_of_their_shards(call, datastore):
    """Two on one shard, one on the other: each cell of theirs, in order, once."""
    with following(call) as one, following(call) as two, following(call, shard=1) as other:
        put(call, datastore, 20)
        put(call, datastore, 10, shard=1)
        assert one.added_ids(20) == two.added_ids(20) == list(range(1, 21))
        assert other.added_ids(10) == list(range(1, 11))


def test_a_reader_that_hangs_up_is_forgotten(quick, call, datastore):
    """Whether it just goes or goes in the middle of history; its seat is free again."""
    put(call, datastore, 20)
    for _ in range(6):
        with following(call) as stream:
            stream.next()
    wait_for_followers(quick, 0)


def test_more_followers_than_the_bound_are_turned_away(quick, call):
    """503 with Retry-After, while other calls go on; as soon as one leaves there is a seat."""
    wait_for_followers(quick, 0)
    with following(call), following(call), following(call):
        with following(call):
            refused = call.get("/shards/0/cells?follow=true", headers=EVENTS)
            assert assert_problem(refused, 503)["retryable"]
            assert "retry-after" in refused.headers
            assert_problem(call.get("/shards/0/cells?wait=5"), 503)
            assert call.get("/shards").status_code == 200
        wait_for_followers(quick, 3)
        with following(call):
            pass


def test_followers_take_nothing_from_other_calls(running, api, datastore):
    """A process that takes one call at a time still takes it while streams are open; each of them was one only while
    it began.
    """
    with api_process(running.path, requests_max=1) as narrow:
        call = narrow.at(datastore)
        with following(call) as one, following(call) as two:
            put(call, datastore, 3)
            assert one.added_ids(3) == two.added_ids(3) == [1, 2, 3]
        wait_for_followers(narrow, 0)
        assert call.get("/shards").status_code == 200


def test_an_event_stream_is_headers_only_for_head(call):
    """HEAD says what GET would begin with, and ends."""
    answer = call("HEAD", "/shards/0/cells?follow=true", headers=EVENTS)
    assert (answer.status_code, answer.headers["content-type"], answer.content) == (200, "text/event-stream", b"")


BAD = {
    "past the head": ("/shards/0/cells?follow=true&after=99", {}, 409, None),
    "an unknown generation": ("/shards/0/cells?follow=true&after=9:0", {}, 409, None),
    "a negative location": ("/shards/0/cells?follow=true&after=-1", {}, 422, "after"),
    "no location": ("/shards/0/cells?follow=true&after=begin", {}, 422, "after"),
    "a last event id that is none": ("/shards/0/cells?follow=true", {"last-event-id": "x"}, 422, "last-event-id"),
    "a last event id that is no ASCII": (
        "/shards/0/cells?follow=true",
        {"last-event-id": b"1:\xb2"},
        422,
        "last-event-id",
    ),
    "a last event id past the head": ("/shards/0/cells?follow=true", {"last-event-id": "1:99"}, 409, None),
    "limit 0": ("/shards/0/cells?follow=true&limit=0", {}, 422, "limit"),
    "limit 1001": ("/shards/0/cells?follow=true&limit=1001", {}, 422, "limit"),
    "a shard out of range": ("/shards/2/cells?follow=true", {}, 404, None),
    "since and after": ("/shards/0/cells?follow=true&after=0&since=2020-01-01T00:00:00Z", {}, 422, "since"),
    "a column that can't be": ("/shards/0/cells?follow=true&columns=1x", {}, 422, "columns"),
    "a wait": ("/shards/0/cells?follow=true&wait=5", {}, 422, "wait"),
    "follow that is no flag": ("/shards/0/cells?follow=maybe", {}, 422, "follow"),
    "another media type": ("/shards/0/cells?follow=true", {"accept": "text/html"}, 422, "accept"),
    "an event stream that isn't to follow": ("/shards/0/cells", {}, 422, "follow"),
    "no such datastore": ("/../no_such_store/shards/0/cells?follow=true", {}, 404, None),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_follow_is_a_problem_before_the_stream(call, kind):
    """Its status says so, nothing has begun; a location that can't be read from comes with where to go on."""
    path, headers, status, field = BAD[kind]
    problem = assert_problem(call.get(path, headers=EVENTS | headers), status, field)
    if status == 409:
        assert (problem["head"], problem["resume_at"]) == (0, 0)


def test_a_stream_is_quiet_between_heartbeats(call):
    """Nothing is sent that isn't in the contract, and no more often."""
    with following(call) as stream:
        began = time.monotonic()
        lines = [line for _, line in zip(range(12), stream.lines, strict=False)]
        assert [line.partition(":")[0] for line in lines] == ["event", "id", "data", ""] * 3
        assert set(lines[::4]) == {"event: heartbeat"}
        assert time.monotonic() - began > HEARTBEAT_S
