"""docs/settings.md lists every setting as `schemaless/config.py` has it, and documents name no other settings.

Run as a program, this file writes the page's table: `.venv/bin/python tests/unit/test_settings_page.py`.
"""

import ast
import inspect
import io
import re
import subprocess
import tokenize
from enum import Enum
from pathlib import Path

from pydantic_core import PydanticUndefined

from schemaless import config
from schemaless.config import Settings, variable_of

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "settings.md"
REWRITE = "run `.venv/bin/python tests/unit/test_settings_page.py`, which writes the table of docs/settings.md"
BEGIN, END = "<!-- settings: begin -->\n", "<!-- settings: end -->\n"
READERS = {
    config.KafkaSettings: "every service, command line, subscribers",
    config.StackSettings: "embedded stack",
    config.ContainerAccountsSettings: "container accounts",
    config.ContainerDatastoreSettings: "container setup",
    config.ApiSettings: "API",
    config.CleanerSettings: "cleaner",
    config.ControllerSettings: "controller",
    config.TailerSettings: "tailer",
    config.IndexerSettings: "indexer",
    config.ConsumerSettings: "trigger programs",
    config.ProbeSettings: "probe",
    config.ClientSettings: "client, command line",
    config.OperatorSettings: "command line",
}
EVERY_SERVICE = "API, cleaner, controller, tailer, indexer, trigger programs, probe"
UNITS = {
    "_rows_per_s": "rows/s",
    "_s": "seconds",
    "_bytes_max": "bytes",
    "_cells_max": "cells",
    "_rows_max": "rows",
    "_port": "TCP port",
}
NAMED = re.compile(r"\bSCHEMALESS_[A-Z0-9_]*[A-Z0-9]\b")
NO_SETTINGS = {"SCHEMALESS_PUBLISHED_PORT_0", "SCHEMALESS_PUBLISHED_PORT_1"}  # of docker-compose.yml
TESTS_OWN = re.compile(r"SCHEMALESS_(TEST|FAULTS)_\w+")
MIB, KIB = 1 << 20, 1 << 10


def sentences() -> dict[tuple[str, str], str]:
    """By class and field, the comment in the field's line or in the lines right above it."""
    source = inspect.getsource(config)
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    fields = {
        (owner.name, line.target.id): line.lineno
        for owner in ast.parse(source).body
        if isinstance(owner, ast.ClassDef)
        for line in owner.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    }
    own_line = {number for number in comments if source.splitlines()[number - 1].lstrip().startswith("#")}

    def above(number: int) -> str:
        before = f"{above(number - 1)} " if number - 1 in own_line else ""
        return before + comments[number] if number in own_line else ""

    return {field: comments.get(number) or above(number - 1) for field, number in fields.items()}


def shown_default(name: str, value: object) -> str:
    if value is PydanticUndefined:
        return "required"
    if value in (None, ()):
        return "none"
    if name.endswith("_bytes_max") and isinstance(value, int):
        return f"{value // MIB} MiB" if value % MIB == 0 else f"{value // KIB} KiB"
    return f"`{value.value if isinstance(value, Enum) else value}`"


def table() -> str:
    """One row for each variable. Where classes share one, the first of them that a service reads describes it."""
    described = sentences()
    found: dict[str, tuple[str, str, str, list[str]]] = {}
    order = sorted(READERS, key=lambda kind: not issubclass(kind, config.ServiceSettings))
    for kind in order:
        for name, field in kind.model_fields.items():
            owner = next(each for each in kind.__mro__ if name in vars(each).get("__annotations__", {}))
            unit = next((unit for suffix, unit in UNITS.items() if f"_{name}".endswith(suffix)), "")
            row = (shown_default(name, field.default), unit, described[owner.__name__, name], [])
            found.setdefault(variable_of(kind, name), row)[3].append(READERS[kind])
    lines = ["| variable | default | unit | read by | meaning |", "|---|---|---|---|---|"]
    for name, (default, unit, meaning, kinds) in found.items():
        readers = ", ".join(kinds).replace(EVERY_SERVICE, "every service")
        lines.append(f"| `{name}` | {default} | {unit} | {readers} | {meaning} |")
    return "\n".join(lines) + "\n"


def test_the_page_lists_every_setting_as_the_code_has_it():
    """A setting and its line on the page change in the same commit."""
    listed = re.search(f"{BEGIN}(.*){END}", PAGE.read_text(), re.DOTALL)
    assert listed, f"{PAGE} has no table between its two comments"
    assert listed[1] == table(), REWRITE


def test_a_comment_of_two_lines_is_shown_whole():
    """The page said only `proxy an address has no rate.` of this one."""
    shown = sentences()["ApiSettings", "requests_per_second_max"]
    assert shown.startswith("Requests that one token")
    assert shown.endswith("Behind a proxy an address has no rate.")


def test_every_setting_has_a_sentence_and_a_reader():
    """A class of settings that the page leaves out is only a base of those that it lists."""
    assert [field for field, sentence in sentences().items() if not sentence.endswith(".")] == []
    bases = {base for kind in READERS for base in kind.__mro__}
    kinds = [each for each in vars(config).values() if inspect.isclass(each) and issubclass(each, Settings)]
    assert [kind.__name__ for kind in kinds if kind not in bases] == []


def test_documents_name_settings_that_exist():
    """A variable in a document is one that a process reads."""
    known = {variable_of(kind, name) for kind in READERS for name in kind.model_fields} | NO_SETTINGS
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    pages = [ROOT / line for line in listed.stdout.splitlines()]
    unknown = {
        f"{page.name}: {name}"
        for page in pages
        for name in NAMED.findall(page.read_text())
        if name not in known and not TESTS_OWN.fullmatch(name)
    }
    assert not unknown


if __name__ == "__main__":
    text = PAGE.read_text()
    PAGE.write_text(re.sub(f"{BEGIN}.*{END}", lambda _: BEGIN + table() + END, text, flags=re.DOTALL))
