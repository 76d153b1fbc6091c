"""Style that matters is a test: sizes, names, layers, docstrings, prose, and what a page may mention."""

import ast
import re
import subprocess
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

from schemaless.__main__ import app

ROOT = Path(__file__).parents[2]
PRODUCT = ("schemaless", "api", "cleaner", "tailer", "consumers", "indexer")
PACKAGES = (*PRODUCT, "bench", "examples")
FUNCTION_LINES_MAX = 60
FILE_LINES_MAX = 450
PARAGRAPH_WORDS_MAX = 80
SEMICOLONS_A_SENTENCE_MAX = 0.05
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
PRODUCT_SOURCES = [path for path in SOURCES if path.relative_to(ROOT).parts[0] in PRODUCT]
LEFTOVERS = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError|HACK)\b")
FRAGMENT = re.compile(r"(Of|By|As|Not|None:)\b")
MENTIONED_PATH = re.compile(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|md|sql|toml|yml|yaml|lock|cnf|properties|json))`")
NAMED_FILE = re.compile(r"(?<![\w/.*{-])((?:[\w-]+/)*[\w-]+\.(?:py|md))\b")
LINK = re.compile(r"\[[^\]]*\]\(([^)#]+)(?:#[^)]*)?\)")
HEADING_LINK = re.compile(r"\[[^\]]*\]\(([\w./-]*)#([^)]+)\)")
SHORT_PATHS_BEGIN_AT = (ROOT, ROOT / "schemaless", ROOT / "tests", ROOT / "docs")

BROAD_EXCEPTS = {
    "schemaless/bus/faust_transport.py": "re-raised: what failed must not be acknowledged while Faust shuts down",
    "schemaless/bus/partition_log.py": "re-raised: the log's state follows from what interrupted it",
    "schemaless/bus/plain_transport.py": "re-raised as BusUnavailable: a failure of the receiver ends the process",
    "schemaless/ops/datastores.py": "re-raised: Ctrl-C ends the threads that make shards, too",
    "schemaless/storage/pymysql_driver.py": "re-raised: as in the other driver",
    "schemaless/runtime/lifecycle.py": "the end of a service: whatever ends it is logged and becomes its exit status",
    "schemaless/storage/asyncmy_driver.py": "re-raised: a connection that was cut off within a statement is closed",
    "schemaless/consume/delivery.py": "nothing that a handler raises ends delivery: the shard is tried again",
    "schemaless/consume/cell_calls.py": "the text of a user's error may raise anything itself",
    "schemaless/testing/watched_worker.py": "re-raised: what a user's function raises is noted for its test",
    "schemaless/consume/trigger_calls.py": "a user's function may raise anything, which means: again later",
}
"""`except Exception` and `except BaseException` outside process entry points, by file, with the reason."""

DRIVERS = {
    "pymysql": ("schemaless/storage/", "schemaless/stack/admin.py"),
    "asyncmy": ("schemaless/storage/",),
    "confluent_kafka": ("schemaless/bus/", "schemaless/stack/kafka_broker.py"),
    "faust": ("schemaless/bus/",),
    "mode": ("schemaless/bus/",),
    "aiokafka": ("schemaless/bus/",),
}
"""The one package of each driver, and the files of the embedded stack that talk to the servers it has just started."""

SLEEPS = {
    "tests/unit/schemaless/runtime/test_lifecycle.py": "processes whose work must not end by itself",
    "tests/unit/schemaless/client/test_drivers.py": "a host that hangs until its request is cancelled",
}
"""Unit tests that sleep for more than a turn of the event loop, with the reason."""


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def tracked(*patterns: str) -> list[Path]:
    command = ["git", "ls-files", "-co", "--exclude-standard", *patterns]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).is_file()]


PAGES = tracked("*.md")
PROSE = [path for path in PAGES if name(path) in ("README.md", "ARCHITECTURE.md") or path.parent == ROOT / "docs"]


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_a_module_says_what_it_owns_and_stays_small(path: Path):
    """Every module opens with a docstring. No file and no function outgrows its bound. Nothing is left to do."""
    text = path.read_text()
    tree = ast.parse(text)
    assert ast.get_docstring(tree) or not text.strip(), "no docstring says what this module owns"
    assert text.count("\n") <= FILE_LINES_MAX
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            size = (node.end_lineno or node.lineno) - node.lineno + 1
            assert size <= FUNCTION_LINES_MAX, f"{node.name} has {size} lines"
    assert not LEFTOVERS.search(text)


@pytest.mark.parametrize("path", PRODUCT_SOURCES, ids=name)
def test_docstrings_open_with_a_plain_sentence(path: Path):
    """A fragment such as "Of each row its newest" has no subject, and a semicolon joins two ideas."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module
    docs = [
        doc
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, kinds) and (doc := ast.get_docstring(node))
    ]
    openings = [doc.split("\n")[0] for doc in docs]
    assert not [line for line in openings if FRAGMENT.match(line) or ";" in line]


def test_class_names_are_unique():
    """One word has one meaning, so one class name exists once."""
    names = Counter(
        node.name
        for path in PRODUCT_SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    assert not [found for found, count in names.items() if count > 1]


def _broad_excepts(path: Path) -> list[int]:
    def is_broad(node: ast.ExceptHandler) -> bool:
        kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        return any(
            kind is None or (isinstance(kind, ast.Name) and kind.id in ("Exception", "BaseException")) for kind in kinds
        )

    handlers = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ExceptHandler)]
    return [node.lineno for node in handlers if is_broad(node)]


@pytest.mark.parametrize("path", [path for path in SOURCES if path.parent.name != "examples"], ids=name)
def test_broad_excepts_are_listed_with_their_reasons(path: Path):
    """They stand in process entry points and where BROAD_EXCEPTS says why. The list names nothing that is gone."""
    if path.name != "__main__.py":
        assert bool(_broad_excepts(path)) == (name(path) in BROAD_EXCEPTS), _broad_excepts(path)


def _imports(tree: ast.Module) -> Iterator[str]:
    """The top package of everything that is imported, inside functions, too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


@pytest.mark.parametrize("path", PRODUCT_SOURCES, ids=name)
def test_drivers_are_imported_in_their_adapters_only(path: Path):
    """Driver errors stop at the adapters (I15), so no other module may know a driver."""
    imported = set(_imports(ast.parse(path.read_text())))
    assert not [driver for driver, homes in DRIVERS.items() if driver in imported and not name(path).startswith(homes)]


def test_every_module_of_the_core_has_a_layer():
    """The import contracts name layers by hand. A module that none of them names would be free to import anything."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = settings["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["name"].startswith("Layers of the core"))
    named = [module.strip() for layer in layers for module in layer.replace(":", "|").split("|")]
    missing = [module for module in _modules_of_the_core() if not any(_is_in(module, layer) for layer in named)]
    assert not missing
    assert not [layer for layer in named if not any(_is_in(module, layer) for module in _modules_of_the_core())]


def _is_in(module: str, layer: str) -> bool:
    return module == layer or module.startswith(layer + ".")


def _modules_of_the_core() -> Iterator[str]:
    for path in (ROOT / "schemaless").rglob("*.py"):
        if path.name != "__init__.py":
            yield ".".join(path.relative_to(ROOT).with_suffix("").parts)


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_pages_name_files_that_exist(path: Path):
    """A path in backquotes exists, seen from the root, schemaless/, tests/ or docs/. So does the target of a link."""
    text = path.read_text()
    mentioned = [
        path
        for path in MENTIONED_PATH.findall(text)
        if not path.startswith(".schemaless/") and not any((top / path).exists() for top in SHORT_PATHS_BEGIN_AT)
    ]
    links = [link for link in LINK.findall(text) if "://" not in link and not (path.parent / link).exists()]
    assert not mentioned + links


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_links_lead_to_headings_that_exist(path: Path):
    """The part of a link behind # is a heading of the page that it leads to."""
    links = [
        (path.parent / page if page else path, heading) for page, heading in HEADING_LINK.findall(path.read_text())
    ]
    assert not [f"{page.name}#{heading}" for page, heading in links if heading not in _headings(page)]


def _headings(page: Path) -> set[str]:
    """The headings of a page as links name them: in lower case, with hyphens for blanks and no other signs."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    return {
        re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in re.findall(r"^#+ (.*)$", text, re.M)
    }


@pytest.mark.parametrize("path", PRODUCT_SOURCES, ids=name)
def test_modules_name_files_that_exist(path: Path):
    """A docstring or a comment that sends its reader to another file names one, by its path or by its end."""
    files = [f"/{name(path)}" for path in tracked("*.py", "*.md")]
    named = NAMED_FILE.findall(path.read_text())
    assert not [file for file in named if not any(known.endswith(f"/{file}") for known in files)]


@pytest.mark.parametrize("path", PROSE, ids=name)
def test_prose_is_plain(path: Path):
    """One idea, one sentence; a paragraph that fills the screen is two paragraphs."""
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.S)
    text = re.sub(r"`[^`]*`", "X", re.sub(r"(?m)^(    .*|\|.*|#.*)$", "", text))
    sentences = [
        sentence
        for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z*X])", re.sub(r"\s+", " ", text))
        if len(sentence.split()) > 2
    ]
    assert sum(sentence.count(";") for sentence in sentences) <= SEMICOLONS_A_SENTENCE_MAX * len(sentences)
    long = [paragraph for paragraph in re.split(r"\n\s*\n", text) if len(paragraph.split()) > PARAGRAPH_WORDS_MAX]
    assert not [paragraph.strip()[:60] for paragraph in long]


def test_every_command_is_documented():
    """README or a page of docs shows each command of `schemaless`."""
    documented = " ".join(path.read_text() for path in PROSE)
    missing = [
        command for command in _commands(typer.main.get_command(app)) if f"schemaless {command}" not in documented
    ]
    assert not missing


def _commands(group, before: str = "") -> Iterator[str]:
    for found, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{before}{found} ")
        elif not command.hidden:
            yield before + found


@pytest.mark.parametrize("path", sorted((ROOT / "tests" / "unit").rglob("*.py")), ids=name)
def test_unit_tests_do_not_sleep(path: Path):
    """A clock is passed in. `sleep(0)` is a turn of the event loop. The list names nothing that is gone."""
    sleeps = re.findall(r"\b(?:time|asyncio)\.sleep\((?!0\))", path.read_text())
    assert bool(sleeps) == (name(path) in SLEEPS)


@pytest.mark.parametrize("path", sorted((ROOT / "tests").rglob("*.py")), ids=name)
def test_randomness_has_a_seed(path: Path):
    """`random.choice` and its like draw from a seed that nobody knows. The one of tests/seed.py is printed."""
    tree = ast.parse(path.read_text())
    modules = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "random"
    }
    assert "random" not in modules or used <= {"Random", "SystemRandom"}


def test_locks_name_no_registry():
    """A lock names packages, versions and hashes, never an address."""
    for path in tracked("*.lock"):
        assert not re.search(r"https?://", path.read_text()), name(path)
