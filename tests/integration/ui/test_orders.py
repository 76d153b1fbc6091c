"""Orders: who may give them, what they say before they act, and how they end."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from schemaless.ops.tokens import list_actions
from schemaless.storage.asyncmy_driver import AsyncStorage
from tests.integration.ui.stage import BLOCKED, row_of, trip


def test_orders_are_offered_to_administrators_only(open_page):
    """Who may read sees no button of an order, and the API refuses the call, too."""
    tab = open_page("triggers/trips/billing", token="read").see("parked cells match")
    for text in ("Pause", "Seek", "Retry all that match…", "Discard all that match…"):
        assert tab.page.get_by_text(text, exact=True).count() == 0
    status = tab.page.evaluate(
        "fetch('/v1/trips/triggers/billing/pause', {method: 'POST', headers: {'content-type': 'application/json',"
        " authorization: 'Bearer ' + sessionStorage.getItem('schemaless token')}, body: '{}'})"
        ".then((one) => one.status)"
    )
    assert status == 403


def test_a_program_is_paused_and_resumed(open_page, installed):
    """What it would touch is shown at once, and again after a change. The reason is shown as it was given."""
    tab = open_page("triggers/trips/billing").see("parked cells match")
    tab.page.get_by_role("button", name="Pause").click()
    tab.see("64 shards would be paused. 1 worker would obey.")
    tab.page.fill("#order-reason", "the card processor is away")
    assert tab.page.locator("dialog button.main").is_disabled()
    tab.page.click("text=Show what it would do")
    assert tab.violations() == []
    tab.page.locator("dialog button.main").click()
    tab.see("It is done.")
    tab.page.get_by_role("button", name="Close").click()
    tab.see("the card processor is away")
    assert installed.call.get("/triggers/billing").json()["state"] == "paused"
    tab.page.get_by_role("button", name="Resume").click()
    tab.see("The whole program would run again.")
    tab.page.locator("dialog button.main").click()
    tab.see("It is done.")
    assert installed.call.get("/triggers/billing").json()["state"] == "running"


def test_a_seek_shows_what_it_would_do(open_page, installed):
    """It can't be given before, and closing the dialog gives nothing."""
    tab = open_page("triggers/trips/billing").see("parked cells match")
    tab.page.get_by_role("button", name="Seek").click()
    assert tab.page.locator("dialog button.main").is_disabled()
    tab.page.fill("#order-to", "beginning")
    tab.page.click("text=Show what it would do")
    tab.see("cells would come again")
    assert tab.page.locator("dialog button.main").is_enabled()
    tab.page.fill("#order-to", "end")
    assert tab.page.locator("dialog button.main").is_disabled()
    tab.page.keyboard.press("Escape")
    tab.until(lambda: tab.page.locator("dialog").count() == 0)
    assert installed.call.get("/triggers/billing").json()["seeks"] == []


def test_a_preview_of_other_values_enables_nothing(open_page):
    """A field that changes while the answer is under way is not what the answer is about."""
    tab = open_page("triggers/trips/billing").see("parked cells match")
    held = []

    def hold(route):
        held.append(route)

    tab.page.route("**/triggers/billing/seek", hold)
    tab.page.get_by_role("button", name="Seek").click()
    tab.page.fill("#order-to", "beginning")
    tab.page.click("text=Show what it would do")
    tab.until(lambda: held)
    tab.page.fill("#order-to", "end")
    held[0].continue_()
    tab.see("A field has changed. Ask again.")
    assert tab.page.locator("dialog button.main").is_disabled()


def test_a_token_that_ends_under_a_dialogue_closes_it(open_page, installed):
    """Whoever signs in next must not find the order of another person."""
    issued = installed.call.post("/tokens", json={"name": "leaving", "scope": "admin"}).json()
    tab = open_page("triggers/trips/billing", token=None).see("A token is needed")
    tab.page.fill("#token", issued["token"])
    tab.page.click("text=Sign in")
    tab.see("parked cells match")
    tab.page.get_by_role("button", name="Pause").click()
    assert tab.page.locator("dialog").count() == 1
    assert installed.call("DELETE", "/tokens/leaving").status_code == 200
    tab.see("A token is needed")
    assert tab.page.locator("dialog").count() == 0


def test_a_job_that_is_gone_is_not_asked_for_again(open_page):
    """The dialogue shows the API's sentence."""
    tab = open_page("indexes/trips/by_driver").see("Values that don't fit")
    asked = []
    tab.page.clock.install()
    gone = '{"title": "x", "status": 404, "detail": "there is no such job", "retryable": false}'
    tab.page.route("**/jobs/*", lambda route: (asked.append(route.request.url), route.fulfill(status=404, body=gone)))
    tab.page.route("**/by_driver/verify", lambda route: route.fulfill(json={"job": "j1"}))
    tab.page.get_by_role("button", name="Verify").click()
    tab.page.locator("dialog button.main").click()
    tab.see("there is no such job")
    tab.page.clock.run_for(5_000)  # a dialogue asks every second
    assert len(asked) == 1


def test_who_administers_one_datastore_switches_no_master(open_page, installed):
    """A master serves all datastores, so the API would refuse it. The other orders are there."""
    issued = installed.call.post("/tokens", json={"name": "of_trips", "scope": "admin"}).json()
    tab = open_page("overview/trips", token=None).see("A token is needed")
    tab.page.fill("#token", issued["token"])
    tab.page.click("text=Sign in")
    tab.see("of_trips: admin").see("Cluster a")
    assert tab.page.get_by_role("button", name="Switch the master").count() == 0
    tab.go("triggers/trips/billing").see("parked cells match")
    assert tab.page.get_by_role("button", name="Pause").count() == 1


@pytest.mark.parametrize(("end", "told"), [("done", "a2 is the master of a"), ("refused", "a2 lacks cells")])
def test_a_switch_is_followed_until_it_is_settled(open_page, end, told):
    """An order that is answered with 202 is not done. The dialogue says so until a controller has settled it."""
    tab = open_page("overview/trips").see("Cluster a")
    given = {"job": "j1", "state": "open", "told": "no controller has settled it yet", "master": "a1", "voters": []}

    def ordered(route):
        is_dry = route.request.post_data_json["dry_run"]
        answer = given | ({"job": None, "state": "dry_run", "told": "a1 is the master of a"} if is_dry else {})
        route.fulfill(status=200 if is_dry else 202, json=answer)

    last = {"job": "j1", "actor": "ada", "state": "open", "told": ""}
    tab.page.route("**/topology/orders", ordered)
    tab.page.route("**/v1/trips/topology", lambda route: route.fulfill(json={"clusters": {"a": {"order": last}}}))
    tab.page.get_by_role("button", name="Switch the master").first.click()
    tab.page.click("text=Show what it would do")
    tab.see("a1 is the master of a.")
    tab.page.locator("dialog button.main").click()
    tab.see("It is ordered. No controller has settled it yet.")
    last |= {"state": end, "told": told}
    tab.see(f"{told}.")
    assert tab.page.locator("dialog .problem").count() == (end == "refused")


def test_a_switch_that_nobody_would_carry_out_says_so(open_page):
    """The API's sentence and its hint are shown, and the order can't be given."""
    tab = open_page("overview/trips").see("Cluster a")
    tab.page.get_by_role("button", name="Switch the master").first.click()
    assert tab.violations() == []
    tab.page.click("text=Show what it would do")
    tab.see("no controller has appointed a master of a").see("start a controller")
    assert tab.page.locator("dialog button.main").is_disabled()


def test_orders_for_an_index_show_what_they_would_touch(open_page, installed):
    """Each is asked for with a dry run first. A drop counts entries, and needs the index's name."""
    tab = open_page("indexes/trips/by_driver").see("Values that don't fit")
    before = installed.call.get("/indexes/by_driver").json()["state"]
    for title, says in {
        "Pause": "Version 1, in 64 shards, would be paused. 1 worker would obey.",
        "Throttle": "would be active with cells_per_s without bound",
        "Repair": "64 shards would be compared.",
    }.items():
        tab.page.get_by_role("button", name=title).click()
        tab.see(says)
        assert tab.page.locator("dialog button.main").is_enabled()
        tab.page.get_by_role("button", name="Cancel").click()
    tab.page.get_by_role("button", name="Drop").click()
    for name, says in {"by_rider": "That is not its name.", "by_driver": "would be deleted."}.items():
        tab.page.fill("#order-name", name)
        tab.page.click("text=Show what it would do")
        tab.see(says)
        assert tab.page.locator("dialog button.danger").is_enabled() == (name == "by_driver")
    tab.see(" entries would be deleted.")
    assert tab.violations() == []
    tab.page.keyboard.press("Escape")
    assert installed.call.get("/indexes/by_driver").json()["state"] == before == "active"


def test_an_index_is_verified_by_a_job(open_page):
    """With progress, and what it found."""
    tab = open_page("indexes/trips/by_driver").see("Values that don't fit")
    tab.page.get_by_role("button", name="Verify").click()
    tab.page.locator("dialog button.main").click()
    tab.see("64 of 64 done").see("0 missing, 0 stale, 0 ghosts, 0 repaired")


async def actions(topology):
    async with AsyncStorage(topology) as storage:
        return [action.what for action in await list_actions(storage, 50)]


def test_parked_cells_are_discarded_with_a_reason(open_page, installed):
    """A dry run says how many, the job says what became of them, and the log of admin actions has it."""
    row = row_of(2000)
    assert installed.call.put(row, 1, {**trip(0), "driver": "nobody"}).status_code == 201
    tab = open_page("triggers/trips/billing").see(f"{BLOCKED + 1} parked cells match")
    tab.page.fill("#parked-row_key", row)
    tab.page.get_by_role("button", name="Filter").click()
    tab.see("1 parked cell matches")
    tab.page.get_by_role("button", name="Discard all that match…").click()
    tab.page.click("text=Show what it would do")
    assert tab.page.locator("dialog button.danger").is_disabled()  # the reason is missing
    tab.page.fill("#order-reason", "the card was sold")
    tab.page.click("text=Show what it would do")
    tab.see("1 parked cell would be discarded")
    assert installed.call.get("/triggers/billing").json()["parked"] == BLOCKED + 1
    tab.page.locator("dialog button.danger").click()
    tab.see("1 of 1 done")
    assert tab.violations() == []
    tab.page.get_by_role("button", name="Close").click()
    tab.see("No cell is parked.")
    assert installed.call.get("/triggers/billing").json()["parked"] == BLOCKED
    with ThreadPoolExecutor() as pool:  # Playwright's loop runs in this thread
        done = pool.submit(asyncio.run, actions(installed.running.topology)).result()
    assert any("parked/discard" in what for what in done)
