"""What goes wrong while a page is open, and what people and programs may have written into what it shows."""

import os
import signal
import subprocess
import sys
import uuid

import httpx
import msgspec
import pytest

from api.access.issuer import CLOCK_SKEW_S
from schemaless.config import ApiSettings
from schemaless.names import trigger_consumer
from schemaless.ops.datastores import create_datastore
from schemaless.position import Position
from schemaless.stack.plan import free_ports
from schemaless.storage import checkpoint_table, parked_table
from schemaless.storage.parked_table import Cause, ParkedCell
from tests.environment import environment_of
from tests.integration.api.api_harness import ROOT, api_process, row_in, wait_ready
from tests.integration.api.follow_harness import wait_for_followers
from tests.integration.api.login import AUDIENCE, running_issuer
from tests.integration.ui.stage import BLOCKED, row_of
from tests.log_harness import run_sql

HOSTILE = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"
PARKED = 10_000
SHARD = 0


def harmless(tab):
    """Nothing was executed, and what is shown is text."""
    assert tab.page.evaluate("window.hacked") is None
    assert tab.page.locator("main script, main img, main iframe, dialog script, dialog img").count() == 0


def test_a_page_without_a_token_asks_for_one(open_page, installed):
    """A wrong one is refused with its reason, a right one is kept for the tab, and signing out forgets it."""
    tab = open_page("triggers/trips", token=None).see("A token is needed")
    assert tab.violations() == []
    tab.page.fill("#token", "sl_wrong")
    tab.page.click("text=Sign in")
    tab.see("That token is not taken: the token isn't known.")
    tab.page.fill("#token", installed.tokens["read"])
    tab.page.keyboard.press("Enter")
    tab.see("read: read").see("billing")
    assert tab.page.evaluate("localStorage.length + document.cookie.length") == 0
    assert installed.tokens["read"] not in tab.page.url
    tab.page.reload()
    tab.see("read: read")
    tab.page.click("text=Sign out")
    tab.see("A token is needed")
    assert tab.page.evaluate("sessionStorage.length") == 0


def test_a_token_that_is_revoked_while_a_page_is_open(open_page, installed):
    """The page ends what it shows, and asks for another one."""
    issued = installed.call.post("/tokens", json={"name": "short", "scope": "read"}).json()
    tab = open_page("overview/trips", token=None).see("A token is needed")
    tab.page.fill("#token", issued["token"])
    tab.page.click("text=Sign in")
    tab.see("cells in 64 shards")
    assert installed.call("DELETE", "/tokens/short").status_code == 200
    tab.see("A token is needed").see("the token was revoked.")
    assert tab.page.get_by_text("cells in 64 shards").count() == 0


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("overview/nowhere", "there is no datastore 'nowhere'"),
        ("shards/trips/64", "datastore trips has the shards 0 to 63, none called '64'"),
        ("shards/trips/x", "datastore trips has the shards 0 to 63"),
        (f"cells/trips/{uuid.UUID(int=7)}", "there is no row"),
        ("cells/trips/x", "row_key"),
        ("indexes/trips/none", "none"),
        ("triggers/trips/none", "no trigger program 'none' has run here yet"),
        ("views/trips", "There is no such view"),
        ("overview/%E0%A4%A", "there is no datastore"),
        ("cells/trips/%3Cimg%20src%3Dx%20onerror%3D%22window.hacked%3D1%22%3E", "row_key"),
        ("overview/%3Cscript%3Ewindow.hacked%3D1%3C%2Fscript%3E", "there is no datastore"),
    ],
)
def test_an_address_of_nothing_says_what_is_missing(open_page, place, text):
    """In the API's words, whatever is in it."""
    tab = open_page(place).see(text)
    harmless(tab)


def test_a_datastore_is_created_and_dropped_while_its_pages_are_open(open_page, installed):
    """Pages that missed it open it by themselves. Then each says that it is gone, asks no longer, and isn't live."""
    issued = installed.call.post("/tokens", json={"name": "early", "scope": "read", "datastores": ["leaving"]}).json()
    tabs = [
        open_page(place).see("there is no datastore 'leaving'") for place in ("overview/leaving", "shards/leaving/1")
    ]
    tabs.append(open_page(token=None).see("A token is needed"))
    tabs[2].page.fill("#token", issued["token"])
    tabs[2].page.click("text=Sign in")
    tabs[2].see("This token reaches none.")
    running = installed.running
    create_datastore(running.topology, installed.kafka, "leaving", 2, 2, administrators=running.administrators)
    for tab, text in zip(tabs, ("0 cells in 2 shards", "head 0", "0 cells in 2 shards"), strict=True):
        tab.see(text)
    for master in installed.storage.masters:
        run_sql(master, "DELETE FROM schemaless.datastore WHERE name = 'leaving'")
    for tab in tabs:
        tab.see("there is no datastore 'leaving' any more: it was dropped")
        assert tab.text("#connection") == "not live"
    wait_for_followers(installed.api, 0)
    assert installed.api.client.get("/v1/leaving/status").status_code == 404


def test_a_token_that_expires_while_a_page_is_open(open_page, installed):
    """A JWT has its end in itself. The page asks for another one, and shows nothing any more."""
    with (
        running_issuer() as issuer,
        api_process(installed.running.path, oidc_issuer=issuer.url, oidc_audience=AUDIENCE) as api,
    ):
        tab = open_page("overview/trips", token=None, port=api.port).see("A token is needed")
        tab.page.fill("#token", issuer.signed("schemaless:trips:read", lives_s=8 - CLOCK_SKEW_S))
        tab.page.click("text=Sign in")
        tab.see("ada: read").see("cells in 64 shards")
        tab.see("A token is needed").see("the JWT has expired.")
        assert tab.page.get_by_text("cells in 64 shards").count() == 0


def test_hostile_text_is_shown_and_never_executed(open_page, installed):
    """In names and values of bodies, in errors of a program, in reasons, and in values that don't fit an index."""
    row = row_of(1000)
    body = {HOSTILE: HOSTILE, "driver": HOSTILE[:40], "created": HOSTILE, "card": "blocked", "rider": HOSTILE}
    assert installed.call.put(row, 1, body).status_code == 201
    assert installed.call.put(row, 2, {**body, "card": "4711", "more": [HOSTILE]}).status_code == 201
    tab = open_page(f"cells/trips/{row}").see("What it waits for").see("2 differences from 1")
    harmless(tab)
    shard = installed.call.get(f"/cells/{row}").json()["cells"]["BASE"]["shard"]
    tab.go(f"shards/trips/{shard}").see(row)
    harmless(tab)
    tab.go("indexes/trips/by_driver").see(HOSTILE[:30])
    tab.page.fill("#field-driver", HOSTILE[:40])
    tab.page.fill("#query-include", "BASE")
    tab.page.click("form.query button")
    tab.see("of version 1")
    harmless(tab)
    pause = {"reason": HOSTILE[:200]}
    assert installed.call.post("/triggers/billing/pause", json=pause).status_code == 200
    try:
        tab.go("triggers/trips/billing").see("match").see(HOSTILE[:60])
        for summary in tab.page.locator("details.version summary").all():
            summary.click()
        harmless(tab)
        tab.go("overview/trips").see(HOSTILE[:60])
        harmless(tab)
    finally:
        assert installed.call.post("/triggers/billing/resume", json={}).status_code == 200
        discard = {"filter": {"row_key": row}, "reason": "the test is over"}
        assert installed.call.post("/triggers/billing/parked/discard", json=discard).status_code == 200
        tab.until(lambda: installed.call.get("/triggers/billing").json()["parked"] == BLOCKED)


def test_a_body_of_one_mebibyte_is_shown_in_part(open_page, installed):
    """All of it on demand, and the page stays quick."""
    row = str(uuid.uuid4())
    text = "x" * ((1 << 20) - 100)
    assert installed.call.put(row, 1, {"text": text}).status_code == 201
    tab = open_page(f"cells/trips/{row}").see("Show all")
    assert len(tab.text("pre.body")) < 5000
    tab.page.click("text=Show all")
    tab.page.get_by_text("Show all").wait_for(state="detached")
    assert len(tab.text("pre.body")) > len(text)


def test_ten_thousand_parked_cells_are_shown_in_pages(open_page, installed):
    """Fifty at a time."""
    datastore, master = installed.datastore, installed.storage.master(installed.datastore.home(SHARD))
    consumer, row = trigger_consumer("many"), row_in(installed.datastore, SHARD)
    master.run(checkpoint_table.make, datastore.name, consumer, [Position(SHARD, 1, 0)])
    records = [
        ParkedCell(
            SHARD, 1, number, row.bytes, "BASE", number, "bill", Cause.ERROR, False, "ValueError: no card", 5,
            [1_700_000_000_000_000], "v1", 1_700_000_000_000_000 + number,
        )
        for number in range(1, PARKED + 1)
    ]  # fmt: skip
    for at in range(0, PARKED, 500):
        part = records[at : at + 500]
        run_sql(master, ";".join(parked_table.put(datastore.name, consumer, record) for record in part))
    try:
        tab = open_page("triggers/trips/many").see("10,000 parked cells match").see("error: 10,000")
        assert tab.page.locator("details.version").count() == 50
        first = tab.text("details.version summary")
        tab.page.get_by_role("button", name="Next page").click()
        tab.until(lambda: tab.text("details.version summary") != first)
        assert tab.page.locator("details.version").count() == 50
        second = tab.text("details.version summary")

        late = [
            msgspec.structs.replace(records[-1], added_id=PARKED + number, ref_key=PARKED + number)
            for number in range(1, 8)
        ]
        run_sql(master, ";".join(parked_table.put(datastore.name, consumer, record) for record in late))
        tab.see("7 more, refresh")
        assert tab.text("details.version summary") == second  # who reads the second page stays there
        tab.page.get_by_role("button", name="7 more, refresh").click()
        tab.until(lambda: tab.text("details.version summary") == first)
        assert tab.page.get_by_text("more, refresh").count() == 0
    finally:
        assert installed.call("DELETE", "/triggers/many").status_code == 200


def started_api(installed, port):
    named = {"topology": installed.running.path, "kafka": "127.0.0.1:9", "port": port, "log_level": "warning"}
    environment = os.environ | environment_of(ApiSettings, named)
    return subprocess.Popen([sys.executable, "-m", "api"], cwd=ROOT, env=environment)


def test_an_api_that_hangs_is_not_live(open_page, installed):
    """Its connections stay open, and nothing comes any longer. A page without a heartbeat asks anew."""
    (port,) = free_ports(1)
    process = started_api(installed, port)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
            wait_ready(client, process)
        tab = open_page(token=None, port=port)
        tab.page.clock.install()
        tab.page.add_init_script(f"sessionStorage.setItem('schemaless token', '{installed.tokens['read']}')")
        tab.page.reload()
        tab.see("cells in 64 shards")
        process.send_signal(signal.SIGSTOP)
        tab.page.clock.fast_forward(20_000)
        assert tab.text("#connection") == "live"
        tab.page.clock.fast_forward(6_000)
        tab.see("The API doesn't answer. What you see is from before.").see("cells in 64 shards")
        assert tab.text("#connection") == "not live"
        process.send_signal(signal.SIGCONT)
        tab.page.clock.run_for(5_000)
        tab.see("The API answers again.")
        assert tab.text("#connection") == "live"
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("place", ["indexes/trips/by_driver", "triggers/trips/billing"])
def test_a_view_that_can_not_be_had_at_first_comes_later(open_page, place):
    """It says that it isn't live, and asks until the API answers."""
    tab = open_page()
    tab.see("Is it running?")
    away = '{"title": "x", "status": 503, "detail": "a master changes", "retryable": true}'
    tab.page.route("**/ui/events/**", lambda route: route.fulfill(status=503, body=away))
    tab.go(place).see("a master changes. What you see is from before.")
    assert tab.text("#connection") == "not live"
    tab.page.unroute("**/ui/events/**")
    tab.see("The API answers again.")
    tab.see("Values that don't fit" if "by_driver" in place else "parked cells match")
    assert tab.text("#connection") == "live"


def test_an_api_that_is_started_again_is_found_again(open_page, installed):
    """The page says that nobody answers, keeps what it shows, and says that it is over."""
    (port,) = free_ports(1)
    process = started_api(installed, port)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
            wait_ready(client, process)
        tab = open_page("overview/trips", port=port).see("cells in 64 shards")
        process.kill()
        process.wait()
        tab.see("The API doesn't answer.").see("cells in 64 shards")
        process = started_api(installed, port)
        tab.see("The API answers again.")
        assert "live" in tab.text("#connection")
    finally:
        process.kill()
        process.wait()
