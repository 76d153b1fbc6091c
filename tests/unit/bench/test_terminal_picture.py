"""A recording of a terminal as a picture, and the recorded demo of the README."""

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from bench.terminal_picture import SHOWN_ROWS, draw, frames_of

ROOT = Path(__file__).parents[3]
PICTURE = ROOT / "docs" / "demo.svg"
SVG = "{http://www.w3.org/2000/svg}"


def cast(*events: tuple[float, str, str]) -> str:
    head = {"version": 2, "width": 80, "height": 100, "title": "make demo"}
    return "\n".join(json.dumps(entry) for entry in (head, *events))


def shown(frame) -> list[str]:
    return ["".join(text for _, text, _ in row) for row in frame.rows]


def test_a_frame_shows_what_the_terminal_showed_at_its_moment():
    """A line that was drawn over is gone, and a kill stands below from its own moment on."""
    frames = frames_of(
        cast((0.0, "o", "loading\r\n"), (5.0, "m", "kill -9 7"), (10.0, "o", "\x1b[1A\x1b[2K\x1b[32mloaded\x1b[0m\r\n"))
    )
    assert shown(frames[0]) == ["loading"]
    before = [frame for frame in frames if frame.at_s < 5]
    after = [frame for frame in frames if 5 <= frame.at_s < 10]
    assert not any(frame.markers for frame in before)
    assert {frame.markers for frame in after} == {("kill -9 7",)}
    assert shown(frames[-1]) == ["loaded"]
    ((_, _, (colour, _)),) = frames[-1].rows[0]
    assert colour == "green"


def test_what_comes_at_once_is_scrolled_through():
    """Each line of a long report is in a frame, in order, and the last frame ends with the last line."""
    report = "".join(f"line {number}\r\n" for number in range(90))
    frames = frames_of(cast((0.0, "o", "begun\r\n"), (9.0, "o", report), *((9.0, "m", f"kill {n}") for n in range(9))))
    seen = list(dict.fromkeys(line for frame in frames for line in shown(frame)))
    assert seen == ["begun", *(f"line {number}" for number in range(90))]
    assert shown(frames[-1])[-1] == "line 89"
    assert max(len(frame.rows) for frame in frames) == SHOWN_ROWS


def test_the_picture_is_well_formed_and_every_row_it_uses_is_there():
    root = ET.fromstring(draw(cast((0.0, "o", "a <b> & \x1b[1mc\x1b[0m\r\n"), (3.0, "m", "kill -9 1"))))
    known = {group.get("id") for group in root.iter(f"{SVG}g")}
    used = {use.get("href") for use in root.iter(f"{SVG}use")}
    assert used
    assert {name.removeprefix("#") for name in used} <= known
    assert "a <b> &" in [text.text for text in root.iter(f"{SVG}text")]


def last_frame(root: ET.Element) -> str:
    """The text that a reader is left with."""
    (strip,) = [group for group in root.iter(f"{SVG}g") if group.get("class") == "strip"]
    defined = {group.get("id"): "".join(group.itertext()) for group in root.iter(f"{SVG}g")}
    return "\n".join(defined[use.get("href", "").removeprefix("#")] for use in strip[-1].iter(f"{SVG}use"))


def test_the_recorded_demo_was_killed_and_holds():
    """README shows it. Its run killed processes of every kind, and no line of its report failed."""
    text = PICTURE.read_text()
    root = ET.fromstring(text)
    assert PICTURE.stat().st_size < 300_000
    assert f'src="docs/{PICTURE.name}"' in (ROOT / "README.md").read_text()
    killed = set(re.findall(r"kill -9 \d+ +# ([\w-]+)", text))
    assert {
        "a1",
        "b2",
        "kafka",
        "tailer-0",
        "indexer-0",
        "cleaner-0",
        "api-0",
        "flights-billing",
    } <= killed
    assert text.count(">holds<") >= 25  # rows that are alike are drawn once
    assert "FAILS" not in text
    assert "findings of the audit" in last_frame(root)


@pytest.mark.parametrize("banned", ["<script", "http://", "https://", "<image", "@import"])
def test_the_recorded_demo_asks_for_nothing_from_elsewhere(banned):
    """An <img> runs no script and fetches nothing, and so needs none."""
    assert banned not in PICTURE.read_text().replace('xmlns="http://www.w3.org/2000/svg"', "")
