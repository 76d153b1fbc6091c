"""The client's tail over a transport in memory: every cell once, in order, whatever hosts do; no hole is passed."""

import uuid
from typing import Any

import httpx
import msgspec
import pytest

from schemaless import Client, Limits, Location, Position
from schemaless.cell import StoredCell
from schemaless.client.answers import position_after
from schemaless.errors import Corrupt, Invalid, LocationGone, NotFound, SchemalessError, Unavailable
from schemaless.found_cell import FoundCell
from schemaless.position import cell_digest

HOSTS = ["http://one", "http://two"]
QUICK = Limits(attempts_max=4, total_timeout_s=2.0, pause_s=0.001)
ROW = "5b1d5b2e-8d5a-4a3e-9a53-4f0f6a3f2a11"
DIGEST = "00000000000000ff"
GONE = {"status": 409, "detail": "past the head", "retryable": False, "head": 1, "resume_at": 1}


def cell(shard: int, added_id: int, generation: int = 1) -> dict[str, Any]:
    return {
        "row_key": ROW,
        "column_name": "BASE",
        "ref_key": 1,
        "body": {},
        "shard": shard,
        "generation": generation,
        "added_id": added_id,
        "created_at": "2026-01-31T00:00:00.000001Z",
    }


def page(
    shard: int, *added_ids: int, to: int | None = None, generation: int = 1, digest: str | None = None
) -> dict[str, Any]:
    end = to if to is not None else added_ids[-1]
    return {
        "cells": [cell(shard, added_id, generation) for added_id in added_ids],
        "next": {"generation": generation, "added_id": end, "digest": digest},
        "head": end,
        "generation": generation,
        "pending": 0,
    }


class Api:
    """Gives the prepared answers one by one, then only empty pages; keeps what it was asked."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[dict[str, Any]] = []
        self.hosts: list[str] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.hosts.append(request.url.host)
        if request.method == "GET":
            return httpx.Response(200, json={"shards": [{"shard": 0}, {"shard": 1}]})
        self.asked.append(msgspec.msgpack.decode(request.content))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, httpx.Response):
            return answer
        return httpx.Response(200, json={"shards": {str(shard): shown for shard, shown in answer.items()}})


def take(api: Api, count: int, *arguments: Any, **options: Any) -> list[FoundCell]:
    with Client(HOSTS, datastore="m", limits=QUICK, transport=httpx.MockTransport(api)) as client:
        tail = client.tail(*arguments, **options)
        return [next(tail) for _ in range(count)]


def places(cells: list[FoundCell]) -> list[tuple[int, int]]:
    return [(cell.shard, cell.added_id) for cell in cells]


def test_each_request_goes_on_where_the_last_page_ended():
    """Empty pages are asked again; `next` is the next position of every shard. The first request doesn't wait."""
    api = Api(
        {0: page(0, 1, 2, digest=DIGEST), 1: page(1, to=0)},
        {0: page(0, to=2, digest=DIGEST), 1: page(1, to=0)},
        {1: page(1, 1), 0: page(0, 3)},
    )
    assert places(take(api, 4, [0, 1], limit=7, wait_s=2)) == [(0, 1), (0, 2), (1, 1), (0, 3)]
    assert [asked["locations"] for asked in api.asked] == [{"0": 0, "1": 0}, *[{"0": f"1:2:{DIGEST}", "1": "1:0"}] * 2]
    assert [(asked["limit"], asked["wait"]) for asked in api.asked] == [(7, 0), (7, 2), (7, 2)]


def test_a_dead_host_costs_no_cell_and_repeats_none():
    """The same question goes to the next host."""
    api = Api({0: page(0, 1)}, httpx.ReadError("reset"), httpx.Response(503), {0: page(0, 2)})
    assert places(take(api, 2, 0)) == [(0, 1), (0, 2)]
    assert api.asked[1] == api.asked[2] == api.asked[3]
    assert api.asked[1]["locations"] == {"0": "1:1"}
    assert len(set(api.hosts[1:3])) == 2


def test_all_shards_are_followed_when_none_is_named():
    """As the datastore lists them."""
    api = Api({0: page(0, to=0), 1: page(1, 1)})
    assert places(take(api, 1)) == [(1, 1)]
    assert api.asked[0]["locations"] == {"0": 0, "1": 0}


STARTS = [5, "5", "1:5", Location(1, 5)]


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize(
    ("shown", "why"),
    [
        (page(0, 6, 8), "missing"),
        (page(0, 7), "missing"),
        (page(0, 6, 6), "again"),
        (page(0, 5, 6), "again"),
        (page(0, 7, 6), "missing"),
        (page(0, 6, to=7), "last cell was .:6"),
        (page(0, to=4), "last cell was .:5"),
        (page(1, 6), "another shard"),
    ],
)
def test_a_log_that_is_not_dense_is_corrupt(start: Any, shown: dict[str, Any], why: str):
    """A cell that is missing, comes again or lies elsewhere: it is told, and nothing of that page is given."""
    with pytest.raises(Corrupt, match=f"shard 0: .*{why}"):
        take(Api({0: shown}), 1, 0, start)


@pytest.mark.parametrize("columns", [(), ("BASE",)])
@pytest.mark.parametrize("start", [Location(2, 5), "2:5", Position(0, 2, 5)])
def test_a_cell_of_an_earlier_generation_is_never_next(start: Any, columns: Any):
    """I9, I13: by its number it would be, from a host that shows the history before a promotion."""
    with pytest.raises(Corrupt, match="generations only grow"):
        take(Api({0: page(0, 6)}), 1, 0, start, columns=columns)


@pytest.mark.parametrize("start", [None, 0])
def test_the_beginning_is_dense_too(start: Any):
    """From nothing the first cell is the first."""
    with pytest.raises(Corrupt, match="1:2 follows 0:0"):
        take(Api({0: page(0, 2)}), 1, 0, start)


@pytest.mark.parametrize("columns", [["BASE"], ("BASE", "STATUS")])
def test_with_columns_cells_may_be_far_apart_but_not_repeated(columns: Any):
    """What lies between them is of other columns; `next` moves on without cells."""
    api = Api({0: page(0, 3, 9, to=20)}, {0: page(0, to=40)}, {0: page(0, 41)}, {0: page(0, 41)})
    with Client(HOSTS, datastore="m", transport=httpx.MockTransport(api)) as client:
        tail = client.tail(0, columns=columns)
        assert places([next(tail) for _ in range(3)]) == [(0, 3), (0, 9), (0, 41)]
        assert api.asked[2]["locations"] == {"0": "1:40"}
        assert api.asked[0]["columns"] == list(columns)
        with pytest.raises(Corrupt):
            next(tail)


def test_locations_are_those_of_the_cells_that_were_given():
    """A new tail goes on from them; what was fetched and not given is given again."""
    api = Api({0: page(0, 1, 2, to=2), 1: page(1, to=0)}, {0: page(0, to=2), 1: page(1, 1)})
    with Client(HOSTS, datastore="m", transport=httpx.MockTransport(api)) as client:
        tail = client.tail({0: None, 1: "end"})
        assert tail.locations == {0: None, 1: "end"}
        first = next(tail)
        assert tail.locations == {0: position_after(first), 1: "end"}
        stored = StoredCell(uuid.UUID(ROW).bytes, "BASE", 1, 0, 1, 1, 1769817600000001, b"")
        assert position_after(first).digest == cell_digest(stored), "the one that the server computes"
        next(tail)
        assert tail.locations == {0: Position(0, 1, 2), 1: Position(1, 1, 0)}


@pytest.mark.parametrize(
    ("problem", "kind"),
    [
        (GONE | {"generation": 1}, LocationGone),
        ({"status": 404, "detail": "no shard"}, NotFound),
    ],
)
def test_what_stands_against_one_shard_is_told_with_its_number(problem: dict[str, Any], kind: type[SchemalessError]):
    """After the cells of the others were given; the tail may be asked on."""
    api = Api({0: {"problem": problem}, 1: page(1, 1)}, {0: {"problem": problem}, 1: page(1, 2)})
    with Client(HOSTS, datastore="m", transport=httpx.MockTransport(api)) as client:
        tail = client.tail({0: 9, 1: 0})
        assert next(tail).shard == 1
        with pytest.raises(kind, match="shard 0: "):
            next(tail)
        assert places([next(tail)]) == [(1, 2)]


def test_a_host_that_reads_from_a_lagging_node_is_waited_for(monkeypatch: pytest.MonkeyPatch):
    """A location that a host gave is past the head of another's node for a moment; a superseded one is told (I13)."""
    monkeypatch.setattr("schemaless.client.tail.LAGGING_PAUSE_S", 0.001)
    lagging = {0: {"problem": GONE | {"generation": 1}}}
    superseded = {0: {"problem": GONE | {"generation": 2}}}
    away = {0: {"problem": {"status": 503, "detail": "away", "retryable": True}}}
    api = Api({0: page(0, 1, 2)}, lagging, away, lagging, {0: page(0, 3)}, superseded)
    with Client(HOSTS, datastore="m", transport=httpx.MockTransport(api)) as client:
        tail = client.tail(0)
        assert places([next(tail) for _ in range(3)]) == [(0, 1), (0, 2), (0, 3)]
        with pytest.raises(LocationGone) as gone:
            next(tail)
    assert gone.value.resume_at == 1


@pytest.mark.parametrize("head", [2, 9])
def test_a_log_that_has_another_cell_there_is_told_and_none_of_it_is_given(head: int):
    """A restored master may have grown again: the digest shows it, and no pause helps (I16)."""
    other = GONE | {"detail": "another cell is at 1:2", "generation": 1, "head": head, "resume_at": 0}
    api = Api({0: page(0, 1, 2, digest=DIGEST)}, {0: {"problem": other}}, {0: page(0, 3)})
    with Client(HOSTS, datastore="m", transport=httpx.MockTransport(api)) as client:
        tail = client.tail(0)
        assert places([next(tail), next(tail)]) == [(0, 1), (0, 2)]
        with pytest.raises(LocationGone, match="another cell is at 1:2") as gone:
            next(tail)
    assert gone.value.resume_at == 0
    assert api.asked[1]["locations"] == {"0": f"1:2:{DIGEST}"}


def test_a_tail_that_nobody_answers_may_be_asked_again():
    """Unavailable after the client's limits; the next try goes on at the same place."""
    api = Api({0: page(0, 1)}, *[httpx.ConnectError("refused")] * 4, {0: page(0, 2)})
    with Client(HOSTS, datastore="m", limits=QUICK, transport=httpx.MockTransport(api)) as client:
        tail = client.tail(0)
        next(tail)
        with pytest.raises(Unavailable):
            next(tail)
        assert next(tail).added_id == 2


def test_waiting_says_nothing_against_a_host():
    """A host that was asked to wait is not passed over as a slow one, and is given the time to wait."""
    timeouts = []

    def handler(request: httpx.Request) -> httpx.Response:
        timeouts.append(request.extensions["timeout"]["read"])
        return Api({0: page(0, len(timeouts))})(request)

    with Client(HOSTS[:1], datastore="m", limits=QUICK, transport=httpx.MockTransport(handler)) as client:
        tail = client.tail(0, wait_s=20)
        next(tail)
        seen = client._hosts._hosts[HOSTS[0]].response_s
        next(tail)
        assert timeouts[1] == pytest.approx(22, abs=0.1)
        assert client._hosts._hosts[HOSTS[0]].response_s == seen


@pytest.mark.parametrize("shards", [[], {}, range(5000)])
def test_too_many_shards_and_none_are_refused(shards: Any):
    """Before anything is asked."""
    with Client(HOSTS, datastore="m") as client, pytest.raises(Invalid):
        client.tail(shards)
