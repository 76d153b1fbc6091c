"""Shards, cells, indexes and triggers before a real installation: what each shows, and what keeps no reader out."""

import json
import re

import pytest

from tests.integration.ui.stage import DRIVERS, TRIPS, row_of

STREAM = "text/event-stream"
PICTURES = 20
COUNTED = """
    window.counts = {};
    const counted = (owner, name) => {
        const real = owner[name];
        window.counts[name] = 0;
        owner[name] = function (...given) { window.counts[name] += 1; return real.apply(this, given); };
    };
    counted(CanvasRenderingContext2D.prototype, "fillRect");
    counted(CanvasRenderingContext2D.prototype, "strokeRect");
    counted(document, "createElement");
    counted(window, "getComputedStyle");
"""
VIEWS = {
    "overview/trips": "Is it running?",
    "shards/trips": "64 shards",
    "shards/trips/4": "Cells of the log",
    "cells/trips": "Type a row key",
    f"cells/trips/{row_of(1)}": "What it waits for",
    "indexes/trips": "by_driver",
    "indexes/trips/by_driver": "Values that don't fit",
    "triggers/trips": "billing",
    "triggers/trips/billing": "parked cells match",
}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_view_can_be_read_by_everybody(open_page, scheme):
    """Names, contrasts and roles as axe-core wants them."""
    tab = open_page(color_scheme=scheme)
    found = {place: tab.go(place).see(text).violations() for place, text in VIEWS.items()}
    assert {place: faults for place, faults in found.items() if faults} == {}


def test_every_view_fits_a_phone(open_page):
    """Nothing but tables and bodies is wider than the screen, and they can be scrolled."""
    tab = open_page(viewport={"width": 360, "height": 740})
    for place, text in VIEWS.items():
        tab.go(place).see(text)
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= 360, place


def test_a_view_can_be_used_with_the_keyboard_alone(open_page):
    """Tab reaches the views, arrow keys a shard, and Enter opens it."""
    tab = open_page("shards/trips").see("64 shards")
    tab.page.focus("canvas")
    for key in ("ArrowRight", "ArrowRight", "ArrowRight"):
        tab.page.keyboard.press(key)
    tab.see("Shard 3 on cluster b")
    tab.page.keyboard.press("Enter")
    tab.see("Shard 3 of trips").see("trigger:billing")


def test_the_heat_map_of_4096_shards_is_fluent(open_page):
    """A picture is drawn once, with two rectangles of a shard at the most, and no element is made for a shard."""
    heads, lags = list(range(4096)), [shard % 7 for shard in range(4096)]
    picture = {"heads": heads, "lags": lags, "placement": ["a", "b"], "unknown": {}}
    pictures = [picture | {"at": at, "faults": {"7": "it stopped"}} for at in range(1, PICTURES + 1)]
    pictures[-1]["faults"]["8"] = "it stopped, too"
    events = "".join(f"event: picture\ndata: {json.dumps(one)}\n\n" for one in pictures)
    tab = open_page().see("Is it running?")
    tab.page.route("**/ui/events/**", lambda route: route.fulfill(content_type=STREAM, body=events))
    tab.page.evaluate(COUNTED)
    tab.page.evaluate("location.hash = '#/shards/trips'")
    tab.see("4,096 shards").see("2 with a fault")
    counts = tab.page.evaluate("counts")
    pictures_shown = counts["strokeRect"]
    assert pictures_shown >= PICTURES
    assert 4096 * pictures_shown <= counts["fillRect"] <= 2 * 4096 * pictures_shown
    assert counts["getComputedStyle"] <= pictures_shown
    assert counts["createElement"] < 100 * pictures_shown
    assert tab.page.locator("main *").count() < 100


def test_a_shard_shows_new_cells_as_they_come(open_page, installed):
    """The live tail, by the event stream of the log."""
    tab = open_page("shards/trips").see("64 shards")
    row = row_of(7)
    shard = installed.call.get(f"/cells/{row}").json()["cells"]["BASE"]["shard"]
    tab.go(f"shards/trips/{shard}").see("Cells of the log")
    tab.page.check("#live")
    tab.see("Following the log")
    body = {"state": "a cell that came while somebody looked"}
    assert installed.call.post(f"/cells/{row}/NOTE", json=body).status_code == 201
    tab.see("a cell that came while somebody looked")


def test_a_burst_of_cells_is_drawn_once_a_frame(open_page, installed):
    """Many cells come between two frames. Each body is shortened once."""
    tab = open_page("shards/trips/4").see("Cells of the log")
    cell = {"generation": 1, "row_key": row_of(1), "column_name": "BASE", "ref_key": 1, "created_at": "2026-11-26"}
    cells = [cell | {"added_id": number, "body": {"text": "x" * 1000, "number": number}} for number in range(1, 501)]
    events = "".join(f"event: cell\ndata: {json.dumps(one)}\n\n" for one in cells)
    tab.page.route("**/cells?follow=true*", lambda route: route.fulfill(content_type=STREAM, body=events))
    tab.page.evaluate(
        "window.tables = 0; const make = document.createElement.bind(document);"
        " document.createElement = (tag) => { window.tables += tag === 'table'; return make(tag); }"
    )
    tab.page.check("#live")
    tab.see("1:500")
    assert tab.page.evaluate("window.tables") < 50  # two of each picture, and one of each frame
    assert tab.page.locator("[aria-label='Cells of the log'] tbody tr").count() == 200


def test_a_row_is_found_by_its_location(open_page, installed):
    """With columns, and the differences between two versions."""
    stored = installed.call.get(f"/cells/{row_of(2)}").json()["cells"]["STATUS"]
    tab = open_page("cells/trips").see("Type a row key")
    tab.page.fill("#row", f"{stored['shard']}:{stored['generation']}:{stored['added_id']}")
    tab.page.click("text=Find")
    tab.see(row_of(2))
    tab.page.click("[aria-label='Versions of STATUS']")
    tab.see("2 differences from 1")
    table = tab.text("[aria-label='Differences from ref key 1']")
    assert re.search(r'state\s+"started"\s+"completed"', table)
    assert re.search(r"minutes\s+none\s+12", table)


def test_the_timeline_is_compact_or_full(open_page):
    """The calls of one cell are one line, or each is one."""
    tab = open_page(f"cells/trips/{row_of(0)}").see("What it waits for")
    assert tab.page.locator(".timeline .failed_call").count() == 1
    assert "2 times" in tab.text(".timeline .failed_call")
    tab.page.check("text=every attempt and every copy")
    tab.until(lambda: tab.page.locator(".timeline .failed_call").count() == 2)
    tab.see("schemaless parked retry billing")


def test_numbers_are_shown_as_they_were_stored(open_page, installed):
    """JavaScript would make another number of them."""
    row = row_of(TRIPS + 1)
    body = '{"large": 9007199254740993, "float": 1.0, "tiny": 1e-7}'
    path = f"/cells/{row}/BASE/9223372036854775807"
    assert installed.call("PUT", path, content=body, headers={"content-type": "application/json"}).status_code == 201
    shown = open_page(f"cells/trips/{row}").see("9223372036854775807").text("pre.body")
    assert '"large": 9007199254740993' in shown
    assert '"float": 1.0' in shown
    assert '"tiny": 1e-7' in shown


def test_an_index_is_queried_by_a_form(open_page):
    """Its fields come from the definition, and the answer says how fresh it is."""
    tab = open_page("indexes/trips/by_driver").see("Values that don't fit")
    tab.page.fill("#field-driver", DRIVERS[0])
    tab.page.fill("#query-include", "STATUS")
    tab.page.check("#query-explain")
    tab.page.click("form.query button")
    tab.see("10 entries of version 1").see('"state": "completed"').see("rows_read")
    tab.page.select_option("[aria-label='Comparison of created']", "lt")
    tab.page.fill("#field-created", "yesterday")
    tab.page.click("form.query button")
    assert "created" in tab.text("[aria-live=polite] .problem")


def test_an_erased_cell_says_so_in_place_of_its_body(open_page):
    """In its row, beside the version that is left, and in the log. Nothing compares with it, or copies it."""
    row, at = row_of(1), "2026-01-31T08:00:00.000000Z"
    cell = {"row_key": str(row), "column_name": "BASE", "shard": 1, "generation": 1, "created_at": at}
    stub = cell | {"ref_key": 2, "added_id": 2, "erased": {"erasure": "5a1c0ffee00c0ffe", "erased_at": at}}
    left = cell | {"ref_key": 1, "added_id": 1, "body": {"fare": 12.5}}
    events = f"event: cell\nid: 1:2\ndata: {json.dumps(stub)}\n\n"
    tab = open_page()
    found = {"row_key": str(row), "cells": {"BASE": stub}}
    versions = {"cells": [stub, left], "next": None}
    tab.page.route(f"**/v1/trips/cells/{row}", lambda route: route.fulfill(json=found))
    tab.page.route(f"**/cells/{row}/BASE/versions?*", lambda route: route.fulfill(json=versions))
    tab.page.route("**/cells?follow=true*", lambda route: route.fulfill(content_type=STREAM, body=events))
    tab.go(f"cells/trips/{row}").see("by 5a1c0ffee00c0ffe.")
    assert tab.page.locator(".state", has_text="erased").count() == 1
    assert tab.page.get_by_text("Copy the body").count() == 1
    assert tab.page.get_by_text("differences from").count() == 0
    tab.go("shards/trips/1").see("Cells of the log")
    tab.page.check("#live")
    tab.see("5a1c0ffee00c0ffe")
