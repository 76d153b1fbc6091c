"""What README and docs show to be pasted: commands and blocks of Python, in the order of a page."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = re.compile(r"(schemaless|curl|kcat|python|\.venv/bin/\w+) ")


@dataclass(frozen=True)
class Step:
    """Something that a reader pastes. `kind` is shell, or the language of a fenced block."""

    page: str
    line: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"


def steps_of(page: Path) -> list[Step]:
    """Commands stand in fenced blocks without a language, or are indented by four.

    Those behind a `$` answer a fault, so they belong to the tests that make it.
    """
    lines = iter(enumerate(page.read_text().splitlines(), start=1))
    found: list[Step] = []
    for number, line in lines:
        if line.startswith("```"):
            language = line.removeprefix("```").strip()
            block = list(_until_fence(lines))
            if language:
                found.append(Step(page.name, number, language, "\n".join(text for _, text in block) + "\n"))
            else:
                found += _commands(page.name, iter(block))
        elif line.startswith("    ") and COMMAND.match(line.strip()):
            found += _commands(page.name, lines, first=(number, line[4:]), indent=4)
    return found


def _until_fence(lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    for number, line in lines:
        if line.startswith("```"):
            return
        yield number, line


def _commands(
    page: str, lines: Iterator[tuple[int, str]], first: tuple[int, str] | None = None, indent: int = 0
) -> Iterator[Step]:
    """Yields the commands of a block, or the one that begins with `first`. A backslash or a quote goes on."""
    given = iter([first]) if first is not None else lines
    for number, line in given:
        if not COMMAND.match(line):
            continue
        text = line
        while text.endswith("\\") or text.count("'") % 2:
            text += "\n" + next(lines)[1][indent:]
        yield Step(page, number, "shell", text)
