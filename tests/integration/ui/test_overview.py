"""The page itself, and its overview: what a browser may load, five answers, and what becomes of them in an outage."""

import json
import re
from contextlib import ExitStack

import httpx
import pytest

from schemaless.names import trigger_consumer
from schemaless.position import Position
from schemaless.storage import checkpoint_table
from tests.integration.api.follow_harness import wait_for_followers
from tests.log_harness import run_sql

SHARD = 4

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:;"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def test_the_page_loads_nothing_but_its_own_files(installed):
    """No token is needed for them, no script or style is inline, and none is loaded from anywhere else."""
    with httpx.Client(base_url=installed.api.client.base_url) as nobody:
        page = nobody.get("/ui")
        assert page.headers["content-security-policy"] == POLICY
        assert not re.search(r"<style|style=|<script[^>]*>[^<]|\son\w+=|https?:", page.text)
        for path in re.findall(r'(?:src|href)="(ui/[^"]+)"', page.text):
            file = nobody.get(f"/{path}")
            assert (file.status_code, file.headers["x-content-type-options"]) == (200, "nosniff")
            assert file.headers["content-security-policy"] == POLICY
            assert nobody.get(f"/{path}", headers={"if-none-match": file.headers["etag"]}).status_code == 304
        assert nobody.get("/ui/files/page.py").status_code == 404
        assert nobody.get("/ui/session").status_code == 401
        assert nobody.get("/ui/events/trips").status_code == 401


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_overview_gives_five_answers(open_page, scheme):
    """Each with its cause in words and a link to the place, and the installation below. Nothing keeps a reader out."""
    tab = open_page("overview/trips", color_scheme=scheme, token="read").see("Is it running?")
    tab.see("cells in 64 shards").see("cells parked by billing").see("Cluster b")
    assert tab.page.locator(".tile").count() == 5
    assert tab.page.locator(".tile .cause a[href='#/shards/trips']").count() == 1
    assert re.search(r"vm|localhost|\w+, process \d+", tab.text("section[aria-label=Installation]"))
    assert tab.violations() == []


def test_the_overview_fits_a_phone(open_page):
    """Nothing is wider than the screen."""
    tab = open_page("overview/trips", viewport={"width": 360, "height": 740}).see("Cluster a")
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= 360
    assert tab.violations() == []


@pytest.mark.parametrize(
    ("name", "role", "answer", "state"),
    [("b2", "minion", "Yes, with remarks", "healthy"), ("b1", "master", "In part", "master down")],
)
def test_a_server_that_is_killed_is_named(open_page, installed, name, role, answer, state):
    """The open page says who doesn't answer and how it is started, and that it answers again."""
    tab = open_page("overview/trips").see("Is it running?")
    assert tab.text(".tile .answer") in ("Yes", "Yes, with remarks")
    server = installed.running.servers[name]
    server.kill()
    try:
        tab.see(f"{role} {name} of cluster b doesn't answer").see(f"schemaless up {name}")
        assert tab.text(".tile .answer") == answer
        assert tab.text(".card:last-child h3") == f"Cluster b {state}"
    finally:
        server.start()
    tab.until(lambda: name not in tab.text(".tile"))


def test_pages_share_one_look_at_the_servers(installed):
    """Twenty pages see pictures of the same moments, and nobody asks once the last one is closed."""
    headers = dict(installed.api.client.headers)
    base = installed.api.client.base_url
    with httpx.Client(base_url=base, headers=headers, limits=httpx.Limits(max_connections=None)) as client:
        with ExitStack() as stack:
            streams = [
                stack.enter_context(client.stream("GET", "/ui/events/trips", timeout=20)).iter_lines()
                for _ in range(20)
            ]
            seen = [
                {line[:40] for line in (next(one) for _ in range(12)) if line.startswith("data")} for one in streams
            ]
        moments = set.union(*seen)
        assert all(len(one & moments) >= 3 for one in seen)
        assert len(moments) <= 6
    wait_for_followers(installed.api, 0)


def picture_of(installed, view):
    with installed.api.client.stream("GET", f"/ui/events/trips?view={view}") as stream:
        return json.loads(next(line for line in stream.iter_lines() if line.startswith("data: "))[6:])


def shown(open_page, picture):
    """The overview of a picture."""
    tab = open_page("cells/trips").see("Type a row key")
    event = f"event: picture\ndata: {json.dumps(picture)}\n\n"
    tab.page.route("**/ui/events/**", lambda route: route.fulfill(content_type="text/event-stream", body=event))
    return tab.go("overview/trips").see("Is it running?")


def test_what_is_unknown_is_never_good_news(open_page, installed):
    """Values that don't fit can't be counted while a master is away, and no time can be given for a build."""
    picture = picture_of(installed, "overview")
    (program,), (index,) = picture["triggers"]["triggers"], picture["indexes"]["indexes"]
    program |= {"lag": 500, "rate": 10.0, "parked": 0, "failing_count": 0, "tripped_workers": 0, "stopped": []}
    index["problems"] = None
    version = index["versions"][0]
    known = version | {"state": "building", "progress": {"done": 50, "total": 100, "eta_s": 60}}
    unknown = version | {"state": "building", "progress": {"done": None, "total": None, "eta_s": None}}
    index["versions"] = [known, unknown]
    picture["history"]["rate"][-1] = None
    page = shown(open_page, picture).page
    page.click(".tile:nth-child(5) summary")
    text = page.inner_text
    assert text(".tile:nth-child(4) .answer") == "Unknown"
    assert text(".tile:nth-child(4) .cause") == "nobody knows what doesn't fit index by_driver"
    assert text(".tile:nth-child(5) .answer") == "Unknown"
    causes = text(".tile:nth-child(5)")
    assert "by_driver is being built: 50 %, about 60 s to go" in causes
    assert "by_driver is being built: unknown while a master is away" in causes
    assert "billing has 500 cells to go" in causes
    assert "catch up" not in causes


def test_names_as_long_as_they_may_be_fit_a_phone(open_page, installed):
    """Also those without a place to break them, in tiles, lists and headings."""
    picture, name = picture_of(installed, "overview"), "a_" + "long" * 9
    (index,) = picture["indexes"]["indexes"]
    index |= {"name": name, "state": "failed", "reason": "x" * 100, "problems": 7}
    tab = shown(open_page, picture)
    tab.page.set_viewport_size({"width": 360, "height": 740})
    tab.see(f"index {name} is failed")
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= 360


def test_a_curve_has_each_sample_at_its_time(open_page, installed):
    """A master that hangs makes samples rare. Its width is fifteen minutes, whatever came in them."""
    picture = picture_of(installed, "overview")
    now = picture["at"]
    picture["history"] = {name: [1, 1, 1] for name in picture["history"]} | {"at": [now - 450, now - 90, now]}
    tab = shown(open_page, picture)
    points = tab.page.locator(".tile polyline").first.get_attribute("points")
    assert [point.split(",")[0] for point in points.split()] == ["100.0", "180.0", "200.0"]


HIDE = "(isHidden) => { Object.defineProperty(document, 'hidden', {value: isHidden, configurable: true});" + (
    " document.dispatchEvent(new Event('visibilitychange')); }"
)


def test_a_tab_in_the_background_follows_nothing(open_page, installed):
    """A browser opens six connections to a server, and tabs that nobody sees would take them."""
    tab = open_page("overview/trips").see("cells in 64 shards")
    wait_for_followers(installed.api, 1)
    tab.page.evaluate(HIDE, True)
    wait_for_followers(installed.api, 0)
    tab.page.evaluate(HIDE, False)
    wait_for_followers(installed.api, 1)
    assert tab.text("#connection") == "live"


def test_the_heat_map_shows_the_slowest_consumer_of_each_shard(installed):
    """How many cells it is behind, and why it stopped. A shard that all have finished has neither."""
    head = picture_of(installed, "shards")["heads"][SHARD]
    assert head > 0
    name, consumer = installed.datastore.name, trigger_consumer("late")
    master = installed.storage.master(installed.datastore.home(SHARD))
    master.run(checkpoint_table.make, name, consumer, [Position(SHARD, 1, 0)])
    try:
        run_sql(
            master, f"UPDATE schemaless.checkpoint SET state = 'stopped', reason = 'x' WHERE consumer = '{consumer}'"
        )
        picture = picture_of(installed, "shards")
        assert picture["lags"][SHARD] == head
        assert picture["faults"] == {str(SHARD): "trigger:late has stopped: x"}
    finally:
        assert installed.call("DELETE", "/triggers/late").status_code == 200
    assert picture_of(installed, "shards")["lags"][SHARD] == 0
