"""A shard's log over HTTP: pages, locations, times, generations. Real servers, a real process."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from schemaless.storage.sql import sql
from tests.integration.api.api_harness import api_process, assert_problem, row_in
from tests.integration.api.follow_harness import following, wait_for_followers

pytestmark = pytest.mark.storage

CELLS = 25


@pytest.fixture(scope="module")
def datastore(make_datastore):
    return make_datastore(shards=2)


@pytest.fixture(scope="module")
def log(api, datastore):
    """Shard 0 with 25 cells: every fifth one in STATUS, the others in BASE. Answers the put's own answers."""
    caller = api.at(datastore)
    rows = [row_in(datastore, 0) for _ in range(CELLS)]
    return [
        caller.put(row, 1, {"n": n}, column="BASE" if n % 5 else "STATUS").json() for n, row in enumerate(rows, start=1)
    ]


@pytest.fixture
def call(api, datastore, log):
    return api.at(datastore)


def page(call, shard=0, **query):
    answer = call.get(f"/shards/{shard}/cells", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def next_after(put):
    """`next` of a page that ends with the cell of a put."""
    return {name: put[name] for name in ("generation", "added_id", "digest")}


AT_BEGINNING = {"generation": 1, "added_id": 0, "digest": "0" * 16}
EMPTY = {"cells": [], "next": AT_BEGINNING, "head": 0, "generation": 1, "pending": 0}


def added_ids(shown):
    return [cell["added_id"] for cell in shown["cells"]]


def test_heads_are_listed_by_shard(call, datastore):
    """Every shard with its home, generation and head."""
    assert call.get("/shards").json() == {
        "shards": [
            {"shard": 0, "cluster": datastore.home(0), "generation": 1, "head": CELLS},
            {"shard": 1, "cluster": datastore.home(1), "generation": 1, "head": 0},
        ]
    }


def test_a_page_begins_after_its_location(call, log):
    """after=10&limit=10 gives 11 to 20 and 20 as the next location; head and pending go with it."""
    shown = page(call, after=10, limit=10)
    assert added_ids(shown) == list(range(11, 21))
    assert shown["next"] == next_after(log[19])
    assert (shown["head"], shown["pending"]) == (CELLS, 5)
    assert page(call, after="1:10", limit=10) == shown
    assert page(call, after="1:10:" + log[9]["digest"], limit=10) == shown


def test_following_next_reads_everything_once(call):
    """From the beginning to the head, where `next` stays."""
    seen, after = [], "0"
    while True:
        shown = page(call, after=after, limit=7)
        seen += added_ids(shown)
        after = "{generation}:{added_id}:{digest}".format(**shown["next"])
        if not shown["pending"]:
            break
    assert seen == list(range(1, CELLS + 1))
    assert page(call, after=after)["next"] == shown["next"]
    assert added_ids(page(call)) == seen, "without a location the log begins at its beginning"


def test_an_empty_shard_has_an_empty_page(call):
    """Its location is the beginning."""
    assert page(call, shard=1) == page(call, shard=1, after="1:0:" + "0" * 16) == EMPTY


def test_columns_are_searched_up_to_the_limit_of_cells(call):
    """`next` is the last added_id examined: the last cell of a full page, the head of one that isn't."""
    shown = page(call, columns="STATUS", limit=2)
    assert (added_ids(shown), shown["next"]["added_id"], shown["pending"]) == ([5, 10], 10, 15)
    shown = page(call, columns="STATUS", after=10, limit=10)
    assert (added_ids(shown), shown["next"]["added_id"], shown["pending"]) == ([15, 20, 25], 25, 0)
    shown = page(call, columns="NONE,OTHER")
    assert (shown["cells"], shown["next"]["added_id"], shown["pending"]) == ([], 25, 0)


def test_a_search_for_columns_is_bounded_and_says_how_far_it_came(running, api, datastore, log):
    """Of a rare column a page may be empty or short while `next` moves; `pending` is always head - `next`."""
    with api_process(running.path, {"api.follow.log_pages.LOG_EXAMINED_MAX": 4}) as bounded:
        call = bounded.at(datastore)
        seen, after, pages = [], "1:0", 0
        while True:
            shown = page(call, after=after, columns="STATUS", limit=3)
            assert shown["pending"] == CELLS - shown["next"]["added_id"]
            assert (shown["head"], len(shown["cells"]) <= 1) == (CELLS, True)
            seen += added_ids(shown)
            after = "{generation}:{added_id}:{digest}".format(**shown["next"])
            pages += 1
            if not shown["pending"]:
                break
        assert (seen, pages) == ([5, 10, 15, 20, 25], 7)
        body = {"locations": {"0": 1, "1": "end"}, "columns": ["STATUS"], "wait": 30}
        shards = call.post("/shards/cells", json=body).json()["shards"]
        assert (added_ids(shards["0"]), shards["0"]["next"]["added_id"], shards["0"]["pending"]) == ([5], 5, 20)
        assert shards["1"] == EMPTY
        with following(call, columns="STATUS") as stream:
            assert stream.added_ids(5) == seen


@pytest.mark.parametrize("columns", ["", "STATUS"])
def test_the_end_is_the_head_as_it_is_now(call, log, columns):
    """Nothing to read, nothing pending, and where to go on; of one shard and of several."""
    query = {"columns": columns} if columns else {}
    end = {"cells": [], "next": next_after(log[-1]), "head": CELLS, "generation": 1, "pending": 0}
    assert page(call, after="end", **query) == end
    for locations in ({"0": "end"}, {"0": "end", "1": 0}):
        assert call.post("/shards/cells", json={"locations": locations}).json()["shards"]["0"] == end


def test_a_time_is_the_first_cell_that_is_not_older(call, log):
    """created_at ≥ T, also when several cells share it; a time to come is the head; one long ago is the beginning."""
    for put in log[::6]:
        expected = [other["added_id"] for other in log if other["created_at"] >= put["created_at"]]
        assert added_ids(page(call, since=put["created_at"])) == expected
    future = page(call, since="2999-01-01T00:00:00Z")
    assert (future["cells"], future["next"]["added_id"], future["pending"]) == ([], CELLS, 0)
    assert added_ids(page(call, since="1971-01-01T00:00:00+01:00")) == list(range(1, CELLS + 1))


def test_a_location_that_cant_be_read_from_says_where_to_go_on(call):
    """Past the head, and of a generation that never was: 409 with head and resume_at."""
    problem = assert_problem(call.get("/shards/0/cells", params={"after": CELLS + 1}), 409)
    assert (problem["head"], problem["resume_at"]) == (CELLS, CELLS)
    problem = assert_problem(call.get("/shards/0/cells", params={"after": "7:10"}), 409)
    assert (problem["head"], problem["resume_at"]) == (CELLS, 0)
    assert not problem["retryable"]


def test_a_digest_has_to_be_that_of_the_cell(call, log):
    """Of one shard and of several, also at the head: a 409 that says from where on all may differ (I16)."""
    for added_id in (10, CELLS):
        other = f"1:{added_id}:{log[0]['digest']}"
        problem = assert_problem(call.get("/shards/0/cells", params={"after": other}), 409)
        assert (problem["head"], problem["resume_at"], problem["generation"]) == (CELLS, 0, 1)
        assert f"another cell is at 1:{added_id}" in problem["detail"]
        shards = call.post("/shards/cells", json={"locations": {"0": other, "1": 0}}).json()["shards"]
        assert (shards["0"]["problem"]["resume_at"], shards["1"]["pending"]) == (0, 0)
    for text in ("1:10:", "1:10:12", "10:" + log[9]["digest"], "1:10:g" + "0" * 15, "1:10:f" + "0" * 15):
        assert_problem(call.get("/shards/0/cells", params={"after": text}), 422, "after")


def test_a_position_of_another_datastore_is_refused(api, call, log, make_datastore):
    """Its numbers fit, and its digest doesn't (I16)."""
    datastore = make_datastore(shards=2)
    caller = api.at(datastore)
    for n in range(3):
        caller.put(row_in(datastore, 0), 1, {"v": n})
    foreign = caller.get("/shards/0/cells").json()["next"]
    after = f"{foreign['generation']}:{foreign['added_id']}:{foreign['digest']}"
    assert assert_problem(call.get("/shards/0/cells", params={"after": after}), 409)["resume_at"] == 0
    assert caller.get("/shards/0/cells", params={"after": after}).json()["pending"] == 0


def test_a_poll_at_a_head_with_another_cell_ends_with_the_next_one(api, make_datastore):
    """A shard that waits at its head is compared when its next cell comes, and then at once (I16)."""
    datastore = make_datastore(shards=2)
    caller = api.at(datastore)
    caller.put(row_in(datastore, 0), 1, {"v": 1})
    wanted = {"locations": {"0": "1:1:" + "0" * 16, "1": 0}, "wait": 10}
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(lambda: caller.post("/shards/cells", json=wanted).json()["shards"])
        wait_for_followers(api, 1)
        caller.put(row_in(datastore, 0), 1, {"v": 2})
        assert "another cell is at 1:1" in asked.result()["0"]["problem"]["detail"]


def test_several_shards_in_one_call(call, log):
    """Each after its own location, which has any of the forms; what is wrong with one doesn't harm the others."""
    wanted = {"0": 20, "1": {"since": "2020-01-01T00:00:00Z"}, "9": "0"}
    shards = call.post("/shards/cells", json={"locations": wanted, "limit": 3}).json()["shards"]
    assert list(shards) == ["0", "1", "9"]
    assert added_ids(shards["0"]) == [21, 22, 23]
    assert shards["0"]["next"] == next_after(log[22])
    assert (shards["1"]["cells"], shards["1"]["pending"]) == ([], 0)
    assert shards["9"]["problem"]["status"] == 404
    shards = call.post("/shards/cells", json={"locations": {"0": "1:99", "1": "1:0"}}).json()["shards"]
    assert (shards["0"]["problem"]["status"], shards["0"]["problem"]["resume_at"]) == (409, CELLS)
    assert "problem" not in shards["1"]


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ({"locations": {"0": -1}}, "locations.0"),
        ({"locations": {"0": {"at": 1}}}, "locations.0"),
        ({"locations": {"0": True}}, "locations.0"),
        ({"locations": {}}, "locations"),
        ({"locations": {"0": 1}, "limit": 0}, "limit"),
        ({"locations": {"0": 1}, "limits": 1}, "locations"),
        ({}, "locations"),
    ],
)
def test_wrong_locations_are_refused(call, document, field):
    """422 for the whole call, which names the member."""
    assert_problem(call.post("/shards/cells", json=document), 422, field)


def test_a_minion_shows_the_same_log(call, eventually):
    """Once it has caught up: the same cells, by the same added_ids."""

    def behind():
        answer = call.get("/shards/0/cells", params={"read_from": "minion", "limit": 1000})
        answer.status_code = 200 if len(answer.json()["cells"]) == CELLS else 202
        return answer

    answer = eventually(behind, 200)
    assert answer.headers["schemaless-served-by"] == "minion"
    assert answer.json()["cells"] == page(call, limit=1000)["cells"]


def test_pages_are_bounded_in_bytes(api, make_datastore):
    """Large bodies that compress to nothing make short pages, whose `next` still leads to every cell."""
    datastore = make_datastore(shards=2)
    caller = api.at(datastore)
    for _ in range(20):
        caller.put(row_in(datastore, 0), 1, {"x": "a" * 1_000_000})
    first = caller.get("/shards/0/cells", params={"limit": 1000})
    assert len(first.content) <= 17 << 20
    shown = first.json()
    assert added_ids(shown) == list(range(1, shown["next"]["added_id"] + 1))
    assert 0 < shown["pending"] < 20
    rest = caller.get("/shards/0/cells", params={"after": shown["next"]["added_id"]}).json()
    assert added_ids(rest) == list(range(shown["next"]["added_id"] + 1, 21))


def test_a_superseded_location_leads_to_the_last_kept_cell(api, make_datastore, storage):
    """After a new generation began at 4: (1, 3) goes on, (1, 4) is told to go on from 3 (I13)."""
    datastore = make_datastore(shards=2)
    caller = api.at(datastore)
    for _ in range(3):
        caller.put(row_in(datastore, 0), 1, {"v": 1})
    storage.master(datastore.home(0)).run(open_generation, datastore.name, 0)
    caller.put(row_in(datastore, 0), 1, {"v": 2})
    shown = page(caller, after="1:3")
    assert [(cell["generation"], cell["added_id"]) for cell in shown["cells"]] == [(2, 4)]
    assert (shown["next"]["generation"], shown["next"]["added_id"], shown["generation"]) == (2, 4, 2)
    problem = assert_problem(caller.get("/shards/0/cells", params={"after": "1:4"}), 409)
    assert (problem["head"], problem["resume_at"], problem["generation"]) == (4, 3, 2)
    assert page(caller, after="2:4")["pending"] == 0
    shown = page(caller, after="1:2", limit=1)
    assert (shown["next"]["generation"], shown["next"]["added_id"], shown["generation"]) == (1, 3, 2)


def open_generation(datastore, shard):
    """What a promotion that loses nothing leaves behind."""
    yield sql(
        "UPDATE schemaless.shard_head SET generation = 2 WHERE datastore = %s AND shard = %s;"
        "INSERT INTO schemaless.shard_generation VALUES (%s, %s, 2, 4, UTC_TIMESTAMP(6))",
        datastore,
        shard,
        datastore,
        shard,
    )
