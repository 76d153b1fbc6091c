"""The Mermaid pictures of the pages, as far as Python can check them. `docs/render-pictures` parses and draws them."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCED = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
KINDS = re.compile(r"flowchart (LR|RL|TB|TD|BT)|sequenceDiagram|stateDiagram-v2")
QUOTED = re.compile(r'"[^"\n]*"')
BARE_LABEL = re.compile(r"\w[\[({]+[^\[\](){}\n]+|[->.=]\|[^|\n]+\|")
BLOCK = re.compile(r"^\s*(alt|loop|opt|par|critical|break|rect)\b", re.MULTILINE)
END = re.compile(r"^\s*end\s*$", re.MULTILINE)
MESSAGE = re.compile(r"^\s*(\w+)\s*--?(?:>>|x|\))[+-]?\s*(\w+)\s*:", re.MULTILINE)
PARTICIPANT = re.compile(r"^\s*(?:participant|actor)\s+(\w+)", re.MULTILINE)
TRANSITION = re.compile(r"^\s*[\w\[\]*]+ --> [\w\[\]*]+(?:: (.*))?$", re.MULTILINE)
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


def test_the_main_pages_have_pictures() -> None:
    """The way of a put, a buffered write, a shard at a consumer, a tailer's life and the servers are drawn."""
    drawn = {page.name: len(FENCED.findall(page.read_text())) for page in PAGES}
    assert drawn["README.md"] >= 1
    assert drawn["ARCHITECTURE.md"] >= 3
    assert drawn["exactly-once.md"] >= 3
    assert drawn["stack.md"] >= 1


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
