"""The Mermaid pictures of the pages, as far as Python can check them. `docs/render-pictures` parses and draws them."""

import re
from pathlib import Path

import pytest

from schemaless.consume.shard_work import HANDING_OVER
from schemaless.shard_cursor import PREDECESSORS, CursorState
from schemaless.storage.index_definition_table import IndexState

ROOT = Path(__file__).parents[2]
ARCHITECTURE = ROOT / "ARCHITECTURE.md"
PAGES = [ROOT / "README.md", ARCHITECTURE, *sorted((ROOT / "docs").glob("*.md"))]
FENCED = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
KINDS = re.compile(r"flowchart (LR|RL|TB|TD|BT)|sequenceDiagram|stateDiagram-v2")
QUOTED = re.compile(r'"[^"\n]*"')
BARE_LABEL = re.compile(r"\w[\[({]+[^\[\](){}\n]+|[->.=]\|[^|\n]+\|")
BLOCK = re.compile(r"^\s*(alt|loop|opt|par|critical|break|rect)\b", re.MULTILINE)
END = re.compile(r"^\s*end\s*$", re.MULTILINE)
MESSAGE = re.compile(r"^\s*(\w+)\s*--?(?:>>|x|\))[+-]?\s*(\w+)\s*:", re.MULTILINE)
PARTICIPANT = re.compile(r"^\s*(?:participant|actor)\s+(\w+)", re.MULTILINE)
TRANSITION = re.compile(r"^\s*[\w\[\]*]+ --> [\w\[\]*]+(?:: (.*))?$", re.MULTILINE)
ARROW = re.compile(r"(\w+|\[\*\]) --> (\w+)")
PAIRS = ("[]", "()", "{}")


def faults(picture: str) -> list[str]:
    """Returns what would keep Mermaid from drawing a picture, one text for each fault."""
    first, _, body = picture.partition("\n")
    found = [] if KINDS.fullmatch(first) else [f"the kind of picture is not known: {first!r}"]
    found += ["a semicolon ends a statement in Mermaid"] if ";" in picture else []
    found += ["a quote is not closed"] if any(line.count('"') % 2 for line in body.splitlines()) else []
    plain = QUOTED.sub("", body)
    if first.startswith("flowchart"):
        found += [f"{pair} don't balance" for pair in PAIRS if plain.count(pair[0]) != plain.count(pair[1])]
        found += [f"a label needs quotes: {label!r}" for label in BARE_LABEL.findall(plain)]
    if first == "sequenceDiagram":
        known = set(PARTICIPANT.findall(body))
        named = {name for message in MESSAGE.findall(body) for name in message}
        found += [f"no participant is named {name}" for name in sorted(named - known)]
        if len(BLOCK.findall(body)) != len(END.findall(body)):
            found.append("a block has no end")
    if first == "stateDiagram-v2":
        found += [f"a label has a second colon: {label!r}" for label in TRANSITION.findall(body) if ":" in label]
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_picture_can_be_drawn(page: Path) -> None:
    """A picture is of a known kind, its quotes and brackets are closed, and nothing in it is misread by Mermaid."""
    text = page.read_text()
    pictures = FENCED.findall(text)
    assert len(pictures) == text.count("```mermaid"), "a picture is not closed, or is indented"
    assert [fault for picture in pictures for fault in faults(picture)] == []


@pytest.mark.parametrize(
    ("page", "heading", "kind"),
    [
        ("ARCHITECTURE.md", "## A put", "sequenceDiagram"),
        ("ARCHITECTURE.md", "## A buffered write", "sequenceDiagram"),
        ("docs/exactly-once.md", "### A tailer's life", "stateDiagram-v2"),
        ("ARCHITECTURE.md", "## Consumers", "stateDiagram-v2"),
        ("docs/stack.md", "## Processes and servers", "flowchart"),
        ("docs/indexes.md", "## Pause, throttle, drop", "stateDiagram-v2"),
    ],
)
def test_what_needs_a_picture_has_one(page: str, heading: str, kind: str) -> None:
    """A put, a buffered write, a tailer's life, a shard at a consumer, the processes, and the states of an index."""
    section = re.split(r"^#{2,3} ", (ROOT / page).read_text().split(f"\n{heading}\n")[1], flags=re.MULTILINE)[0]
    assert [picture for picture in FENCED.findall(section) if picture.startswith(kind)]


def test_the_states_of_a_shard_are_those_of_the_code() -> None:
    """Each state of a cursor is in the picture of a shard at a consumer, and no other one."""
    drawn = next(picture for picture in FENCED.findall(ARCHITECTURE.read_text()) if "as Locating" in picture)
    assert set(re.findall(r'state "(\w+)', drawn)) == {state.value for state in CursorState}


def test_the_transitions_of_a_shard_are_those_of_the_code() -> None:
    """Each arrow is a legal transition of a cursor, and each legal one is an arrow. Any state may become locating."""
    drawn = next(picture for picture in FENCED.findall(ARCHITECTURE.read_text()) if "as Locating" in picture)
    inside = ARROW.findall(drawn.partition("state Working {")[2].partition("}")[0])
    entered, working = {new for old, new in inside if old == "[*]"}, {new for _, new in inside}
    assert {CursorState(name.lower()) for name in working} == set(HANDING_OVER)
    found = {
        (CursorState(one.lower()), CursorState(other.lower()))
        for old, new in ARROW.findall(drawn)
        if old != "[*]"
        for one in (working if old == "Working" else {old})
        for other in (entered if new == "Working" else {new})
    }
    assert found == {(old, new) for new, before in PREDECESSORS.items() for old in before if old is not new}


def test_the_states_of_an_index_are_those_of_the_code() -> None:
    """Those that users read in `state`."""
    drawn = FENCED.findall((ROOT / "docs" / "indexes.md").read_text())[0]
    assert set(re.findall(r"\b[a-z]+(?= -->)|(?<=--> )[a-z]+", drawn)) == {state.value for state in IndexState}


@pytest.mark.parametrize(
    "picture",
    [
        "graph\n  a --> b\n",
        'flowchart LR\n  a["x] --> b\n',
        "flowchart LR\n  a[x y] --> b\n",
        "flowchart LR\n  a -->|word| b\n",
        'flowchart LR\n  a["x" --> b\n',
        "sequenceDiagram\n  participant A\n  A->>B: asks\n",
        "sequenceDiagram\n  participant A\n  A->>A: asks; waits\n",
        "sequenceDiagram\n  participant A\n  loop each second\n    A->>A: asks\n",
        "stateDiagram-v2\n  A --> B: one: two\n",
    ],
)
def test_a_fault_is_found(picture: str) -> None:
    """Each of these is refused or misread by Mermaid, or breaks a rule of ours."""
    assert faults(picture)
