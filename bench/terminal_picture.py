"""An asciicast as an animated SVG: the terminal above, its markers below, and the time of the run in the title.

CSS moves a strip of frames, so the picture plays where an <img> may run no script. Who prefers no motion sees the last
frame.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from xml.sax.saxutils import escape

import pyte

SHOWN_ROWS, MARKER_ROWS = 23, 4
EVEN_MOMENTS = 24
APART_S = 1.0  # in the run: of two moments that are closer the later one is shown
MOMENT_S, SCROLL_S, END_S = 0.8, 1.6, 7.0
SCROLL_ROWS = 8
CELL_W, CELL_H, FONT = 8.0, 17.0, 13.4
MARGIN, TITLE_H = 12.0, 30.0
PAPER, INK, FAINT, EDGE = "#161b22", "#d5dbe2", "#8b949e", "#444c56"
COLOURS = {
    "default": INK, "black": FAINT, "red": "#ff7b72", "green": "#56d364", "brown": "#e3b341", "blue": "#79c0ff",
    "magenta": "#d2a8ff", "cyan": "#76e3ea", "white": "#f0f6fc", "brightblack": FAINT, "brightred": "#ffa198",
    "brightgreen": "#7ee787", "brightbrown": "#f2cc60", "brightblue": "#a5d6ff", "brightmagenta": "#e2c5ff",
    "brightcyan": "#b3f0ff", "brightwhite": "#ffffff",
}  # fmt: skip
"""The 16 colours of a terminal, under pyte's names."""

Style = tuple[str, bool]  # colour, bold
Row = tuple[tuple[int, str, Style], ...]  # runs of one style: column, text, style


@dataclass(frozen=True)
class Frame:
    at_s: float  # in the run
    shown_s: float  # in the picture
    rows: tuple[Row, ...]
    markers: tuple[str, ...]


def frames_of(cast: str) -> list[Frame]:
    """The moments of a run, and then its end, scrolled through. A row of a frame that is empty is ()."""
    head, *events = [json.loads(line) for line in cast.splitlines()]
    screen = pyte.Screen(head["width"], head["height"])
    stream = pyte.Stream(screen)
    markers: list[str] = []
    frames: list[Frame] = []
    rows: list[Row] = []
    waiting = iter(events)
    event = next(waiting, None)
    moments = _moments(events)
    for at in moments:
        while event is not None and event[0] <= at:
            if event[1] == "o":
                stream.feed(event[2])
            elif event[1] == "m":
                markers.append(event[2])
            event = next(waiting, None)
        top_before = max(0, len(rows) - SHOWN_ROWS)
        rows = _rows_of(screen)
        top = max(0, len(rows) - SHOWN_ROWS)
        is_jump = top - top_before >= SCROLL_ROWS
        for place in (*range(top_before, top, SCROLL_ROWS), top) if is_jump else (top,):
            is_end = at == moments[-1] and place == top
            shown_s = END_S if is_end else SCROLL_S if is_jump else MOMENT_S
            shown = tuple(rows[place : place + SHOWN_ROWS])
            frames.append(Frame(at, shown_s, shown, tuple(markers)))
    return frames


def _moments(events: list[tuple[float, str, str]]) -> list[float]:
    """Moments evenly over the run, those of the markers, and its end."""
    end = events[-1][0]
    even = [end * number / EVEN_MOMENTS for number in range(EVEN_MOMENTS + 1)]
    moments = [end]
    for at in sorted({*even, *(at for at, code, _ in events if code == "m")}, reverse=True):
        if moments[-1] - at >= APART_S:
            moments.append(at)
    return moments[::-1]


def _rows_of(screen: pyte.Screen) -> list[Row]:
    """Every row down to the last one with text."""
    rows = [tuple(_runs(screen, number)) for number in range(screen.lines)]
    while rows and not rows[-1]:
        rows.pop()
    return rows


def _runs(screen: pyte.Screen, number: int) -> Iterator[tuple[int, str, Style]]:
    line = screen.buffer[number]
    cells = [(column, line[column]) for column in range(screen.columns)]
    for style, group in groupby(cells, key=lambda cell: (cell[1].fg, cell[1].bold)):
        run = list(group)
        text = "".join(char.data for _, char in run)
        if text.strip():
            indent = len(text) - len(text.lstrip())
            yield run[0][0] + indent, text.strip(), style


def draw(cast: str) -> str:
    """Returns the SVG."""
    head = json.loads(cast.partition("\n")[0])
    frames = frames_of(cast)
    width = head["width"] * CELL_W + 2 * MARGIN
    height = TITLE_H + (SHOWN_ROWS + 1 + MARKER_ROWS) * CELL_H + MARGIN * 1.5
    known: dict[Row, str] = {}
    strip = [_frame(frame, index * height, head["title"], width, known) for index, frame in enumerate(frames)]
    defined = "".join(f'<g id="{name}">{"".join(map(_text, row))}</g>\n' for row, name in known.items())
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img">
<title>{escape(head["title"])}, recorded</title>
<desc>{escape(" ".join(text for _, text, _ in frames[-1].rows[-1]) if frames[-1].rows else "")}</desc>
<style>{_style(frames, height)}</style>
<defs>
{defined}</defs>
<rect width="{width:g}" height="{height:g}" rx="8" fill="{PAPER}" stroke="{EDGE}"/>
<svg width="{width:g}" height="{height:g}"><g class="strip">
{"".join(strip)}</g></svg>
</svg>
"""


def _style(frames: list[Frame], height: float) -> str:
    total = sum(frame.shown_s for frame in frames)
    steps, passed = [], 0.0
    for index, frame in enumerate(frames):
        steps.append(f"{100 * passed / total:.3f}%{{transform:translateY({-index * height:g}px)}}")
        passed += frame.shown_s
    last = f"translateY({-(len(frames) - 1) * height:g}px)"
    return (
        f"text{{font:{FONT}px ui-monospace,'DejaVu Sans Mono',Menlo,Consolas,monospace;white-space:pre;fill:{INK}}}"
        f".b{{font-weight:bold}}.strip{{transform:{last};animation:play {total:.1f}s step-end infinite}}"
        f"@keyframes play{{{''.join(steps)}100%{{transform:{last}}}}}"
        "@media(prefers-reduced-motion:reduce){.strip{animation:none}}"
    )


def _frame(frame: Frame, y: float, title: str, width: float, known: dict[Row, str]) -> str:
    clock = f"{int(frame.at_s) // 60}:{int(frame.at_s) % 60:02d}"
    killed = sum(marker.startswith("kill") for marker in frame.markers)
    head = f"{title}    {clock} of its own time" + (f"    {killed} processes killed" if killed else "")
    parts = [f'<g transform="translate(0 {y:g})">']
    parts.append(f'<text x="{MARGIN:g}" y="20" style="fill:{FAINT}">{escape(head)}</text>')
    parts.append(f'<path d="M0 {TITLE_H:g}H{width:g}" stroke="{EDGE}"/>')
    for number, row in enumerate(frame.rows):
        if row:
            name = known.setdefault(row, f"r{len(known)}")
            parts.append(f'<use href="#{name}" y="{TITLE_H + (number + 1) * CELL_H:g}"/>')
    edge = TITLE_H + (SHOWN_ROWS + 0.6) * CELL_H
    parts.append(f'<path d="M0 {edge:g}H{width:g}" stroke="{EDGE}"/>')
    for number, marker in enumerate(frame.markers[-MARKER_ROWS:]):
        row = ((0, marker, ("red" if marker.startswith("kill") else "black", False)),)
        name = known.setdefault(row, f"r{len(known)}")
        parts.append(f'<use href="#{name}" y="{edge + (number + 1.2) * CELL_H:g}"/>')
    return "".join(parts) + "</g>\n"


def _text(run: tuple[int, str, Style]) -> str:
    """The length is given, so columns meet whatever font the reader's machine has."""
    column, text, (colour, bold) = run
    length = f' textLength="{len(text) * CELL_W:g}" lengthAdjust="spacingAndGlyphs"' if len(text) > 1 else ""
    fill = COLOURS.get(colour, f"#{colour}")
    style = ("" if fill == INK else f' style="fill:{fill}"') + (' class="b"' if bold else "")
    return f'<text x="{MARGIN + column * CELL_W:g}"{length}{style}>{escape(text)}</text>'
