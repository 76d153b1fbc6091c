"""Style that matters is a test: budgets, sizes, names, layers, docstrings, prose, and what a page may mention."""

import ast
import re
import subprocess
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest
import typer.main

from schemaless.__main__ import app
from tests.unit import tidy_budgets

ROOT = Path(__file__).parents[2]
PRODUCT = ("schemaless", "api", "cleaner", "controller", "tailer", "consumers", "indexer")
BUDGETED = (*PRODUCT, "bench")
PACKAGES = (*BUDGETED, "examples")
FUNCTION_LINES_MAX = 60
FILE_LINES_MAX = 900
SLACK_SHARE = 0.02
SLACK_MIN = 20
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
    "schemaless/runtime/forks.py": "re-raised, or the end of a process that a function forked",
    "schemaless/bus/faust_transport.py": "re-raised: what failed must not be acknowledged while Faust shuts down",
    "schemaless/bus/partition_log.py": "re-raised: the log's state follows from what interrupted it",
    "schemaless/bus/plain_transport.py": "re-raised as BusUnavailable: a failure of the receiver ends the process",
    "schemaless/ops/datastores.py": "re-raised: Ctrl-C ends the threads that make shards, too",
    "schemaless/storage/pymysql_driver.py": "re-raised: as in the other driver",
    "schemaless/runtime/lifecycle.py": "the end of a service: whatever ends it is logged and becomes its exit status",
    "schemaless/storage/asyncmy_driver.py": "re-raised: a connection that was cut off within a statement is closed",
    "schemaless/consume/delivery.py": "nothing that a handler raises ends delivery: the shard is tried again",
    "schemaless/testing/trigger_kit.py": "re-raised: what a user's function raises is noted for its test",
    "schemaless/consume/cell_calls.py": "a user's function may raise anything, and so may the text of what it raises",
}
"""`except Exception` and `except BaseException` outside process entry points, by file, with the reason."""

DRIVERS = {
    "pymysql": ("schemaless/storage/",),
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

WAITS_OTHERWISE = {
    "tests/log_harness.py": "puts for some seconds",
    "tests/faults/test_memory_under_attack.py": "attacks for some seconds",
    "tests/faults/test_tailer_halted.py": "what isn't refused in time is left to the test of its step",
    "tests/integration/api/test_follow_process.py": "a rate is that of its last window if none was below the bound",
    "tests/integration/api/test_process.py": "asks for some seconds",
    "tests/integration/bus/test_kafka_accounts.py": "a consumer is polled until it raises",
    "tests/integration/consumers/test_identity.py": "a log is read for some seconds",
    "tests/integration/ops/test_moves.py": "a mover stands for half a second",
    "tests/integration/ops/test_erasures.py": "puts for some seconds",
    "tests/integration/subscriber/test_subscriber_examples.py": "kills for some seconds",
    "tests/integration/ui/conftest.py": "the page's own clock lets the browser go on meanwhile",
    "tests/unit/tailer/test_cluster_reader.py": "two seconds are far less than the question has",
}
"""Tests that compare the clock or have a time-out of their own, with the reason."""


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def tracked(*patterns: str) -> list[Path]:
    command = ["git", "ls-files", "-co", "--exclude-standard", *patterns]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).is_file()]


PAGES = tracked("*.md")
TESTS = sorted((ROOT / "tests").rglob("*.py"))
UNIT_TESTS = [path for path in TESTS if path.is_relative_to(ROOT / "tests" / "unit")]
PROSE = [path for path in PAGES if name(path) in ("README.md", "ARCHITECTURE.md") or path.parent == ROOT / "docs"]


def refuse(offenders: Iterable[str]) -> None:
    """Fails with all offenders, one on each line."""
    if found := sorted(offenders):
        pytest.fail("\n".join(["", *found]), pytrace=False)


@cache
def nodes(path: Path) -> list[ast.AST]:
    """The whole tree of a file, which is parsed once for all tests. The module itself is the first node."""
    return list(ast.walk(ast.parse(path.read_text())))


def test_packages_keep_their_budgets():
    """Lines and statements of a package only fall, and its budget falls with them. Every package has one.

    What a script writes has no weight.
    """
    lines, statements = Counter[str](), Counter[str]()
    for path in SOURCES:
        if path.relative_to(ROOT).parts[0] in BUDGETED and name(path) not in tidy_budgets.WRITTEN:
            lines[name(path.parent)] += path.read_text().count("\n")
            statements[name(path.parent)] += sum(isinstance(node, ast.stmt) for node in nodes(path))
    packages = lines.keys() | tidy_budgets.PACKAGES.keys()
    faults = [_budget_fault(package, (lines[package], statements[package])) for package in packages]
    refuse(fault for fault in faults if fault)


def _budget_fault(package: str, weight: tuple[int, int]) -> str | None:
    budget = tidy_budgets.PACKAGES.get(package)
    if not any(weight):
        return f"{package} has no lines: it needs no budget" if budget else None
    if not budget:
        return f'{package} has no budget: write "{package}": {weight},'
    if any(now > most for now, most in zip(weight, budget, strict=False)):
        reasoned = (*weight, "the reason")
        return f'{package} is above {budget[:2]}: take something out, or write "{package}": {reasoned},'
    if any(most - now > max(SLACK_MIN, SLACK_SHARE * most) for now, most in zip(weight, budget, strict=False)):
        return f'{package} is smaller than its budget: write "{package}": {(*weight, *budget[2:])},'
    return None


def test_a_module_gives_a_name_once():
    """A second one would replace the first for all functions of the module, as it can when two modules become one."""
    twice = list[str]()
    for path in SOURCES:
        names = Counter[str]()
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names[node.name] += not node.decorator_list or node.name not in names
            elif isinstance(node, ast.Assign):
                names.update(
                    each.id
                    for target in node.targets
                    for each in ast.walk(target)
                    if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
                )
        twice += [f"{name(path)}: {each} is given twice" for each, count in names.items() if count > 1]
    refuse(twice)


def test_a_module_with_one_importer_has_a_wall():
    """A module that no second file of the product imports is listed with its wall. The list names no other module."""
    importers = _importers()
    apart = {
        name(path): found
        for path in PRODUCT_SOURCES
        if path.name not in ("__init__.py", "__main__.py") and len(found := importers[_module(path)]) <= 1
    }
    listed = Counter(
        f"{folder}/{module}.py"
        for folders in tidy_budgets.ONE_IMPORTER.values()
        for folder, modules in folders.items()
        for module in modules.split()
    )
    refuse(
        [
            f"{file} is imported by {', '.join(apart[file]) or 'no file'}: fold it, or list it with its wall"
            for file in apart.keys() - listed.keys()
        ]
        + [f"{file} is gone or has more importers: ONE_IMPORTER names it" for file in listed.keys() - apart.keys()]
        + [f"{file} is listed {count} times" for file, count in listed.items() if count > 1]
        + [f"no wall is called {wall!r}" for wall in tidy_budgets.ONE_IMPORTER.keys() - tidy_budgets.WALLS.keys()]
    )


def _importers() -> dict[str, set[str]]:
    """The files of the product that import each module, also inside functions and for types only."""
    importers = defaultdict(set)
    for path in PRODUCT_SOURCES:
        for node in nodes(path):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names]
                package = node.module if isinstance(node, ast.ImportFrom) else None
                for module in [package, *(f"{package}.{found}" for found in names)] if package else names:
                    importers[module].add(name(path))
    return importers


def test_modules_to_fold_become_fewer():
    """The list of modules without a wall only gets shorter, and its bound with it."""
    left = sum(len(modules.split()) for modules in tidy_budgets.ONE_IMPORTER.get("to fold", {}).values())
    assert left <= tidy_budgets.TO_FOLD, "a module needs a wall, or becomes a section of another file"
    assert left == tidy_budgets.TO_FOLD, f"fewer are left: write TO_FOLD = {left}"


def test_a_module_says_what_it_owns_and_stays_small():
    """Every module opens with a docstring. No file and no function outgrows its bound. Nothing is left to do."""
    refuse(f"{name(path)}: {fault}" for path in SOURCES for fault in _faults(path))


def _faults(path: Path) -> Iterator[str]:
    text = path.read_text()
    module, *others = nodes(path)
    if text.strip() and not ast.get_docstring(module):
        yield "no docstring says what this module owns"
    if (size := text.count("\n")) > FILE_LINES_MAX:
        yield f"has {size} lines"
    for node in others:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            size = (node.end_lineno or node.lineno) - node.lineno + 1
            if size > FUNCTION_LINES_MAX:
                yield f"{node.name} has {size} lines"
    if leftover := LEFTOVERS.search(text):
        yield f"{leftover[0]} is left"


def test_docstrings_open_with_a_plain_sentence():
    """A fragment such as "Of each row its newest" has no subject, and a semicolon joins two ideas."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module
    openings = [
        (path, doc.split("\n")[0])
        for path in PRODUCT_SOURCES
        for node in nodes(path)
        if isinstance(node, kinds) and (doc := ast.get_docstring(node))
    ]
    refuse(f"{name(path)}: {line}" for path, line in openings if FRAGMENT.match(line) or ";" in line)


def test_class_names_are_unique():
    """One word has one meaning, so one class name exists once."""
    names = Counter(node.name for path in PRODUCT_SOURCES for node in nodes(path) if isinstance(node, ast.ClassDef))
    assert not [found for found, count in names.items() if count > 1]


def _broad_excepts(path: Path) -> list[int]:
    def is_broad(node: ast.ExceptHandler) -> bool:
        kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        return any(
            kind is None or (isinstance(kind, ast.Name) and kind.id in ("Exception", "BaseException")) for kind in kinds
        )

    return [node.lineno for node in nodes(path) if isinstance(node, ast.ExceptHandler) and is_broad(node)]


def test_broad_excepts_are_listed_with_their_reasons():
    """They stand in process entry points and where BROAD_EXCEPTS says why. The list names nothing that is gone."""
    judged = [path for path in SOURCES if path.parent.name != "examples" and path.name != "__main__.py"]
    broad = {name(path): lines for path in judged if (lines := _broad_excepts(path))}
    refuse(
        [f"{file}, lines {lines}: no reason is listed" for file, lines in broad.items() if file not in BROAD_EXCEPTS]
        + [f"{file} has none: BROAD_EXCEPTS names it" for file in BROAD_EXCEPTS.keys() - broad.keys()]
    )


def _imports(path: Path) -> Iterator[str]:
    """The top package of everything that is imported, inside functions, too."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def test_drivers_are_imported_in_their_adapters_only():
    """Driver errors stop at the adapters (I15), so no other module may know a driver."""
    refuse(
        f"{name(path)} imports {driver}"
        for path in PRODUCT_SOURCES
        for driver in DRIVERS.keys() & set(_imports(path))
        if not name(path).startswith(DRIVERS[driver])
    )


def test_what_threads_decode_is_a_shape():
    refuse(
        f"{name(path)}: line {line} decodes a kind that isn't in shape()"
        for path in PRODUCT_SOURCES
        if path.is_relative_to(ROOT / "schemaless")  # a service decodes in one thread
        for line in _kinds_decoded_bare(path)
    )


def _kinds_decoded_bare(path: Path) -> Iterator[int]:
    for call in nodes(path):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute | ast.Name):
            called = ast.unparse(call.func)
            kinds = [word.value for word in call.keywords if word.arg == "type" and called.endswith("decode")]
            kinds += call.args[1:] if called == "msgspec.convert" else []
            for kind in kinds:
                if not ast.unparse(kind).startswith(("shape(", "Any", "int", "dict[str, Any]")):
                    yield kind.lineno


def test_every_module_of_the_core_has_a_layer():
    """The import contracts name layers by hand. A module that none of them names would be free to import anything."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = settings["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["name"].startswith("Layers of the core"))
    named = [module.strip() for layer in layers for module in layer.replace(":", "|").split("|")]
    missing = [module for module in _modules_of_the_core() if not any(_is_in(module, layer) for layer in named)]
    assert not missing
    assert not [layer for layer in named if not any(_is_in(module, layer) for module in _modules_of_the_core())]


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def _is_in(module: str, layer: str) -> bool:
    return module == layer or module.startswith(layer + ".")


def _modules_of_the_core() -> Iterator[str]:
    for path in (ROOT / "schemaless").rglob("*.py"):
        if path.name != "__init__.py":
            yield _module(path)


def test_pages_name_files_that_exist():
    """A path in backquotes exists, seen from the root, schemaless/, tests/ or docs/. So does the target of a link."""
    refuse(f"{name(page)} names {file}" for page in PAGES for file in _missing_files(page))


def _missing_files(page: Path) -> Iterator[str]:
    text = page.read_text()
    for path in MENTIONED_PATH.findall(text):
        if not path.startswith(".schemaless/") and not any((top / path).exists() for top in SHORT_PATHS_BEGIN_AT):
            yield path
    yield from (link for link in LINK.findall(text) if "://" not in link and not (page.parent / link).exists())


def test_links_lead_to_headings_that_exist():
    """The part of a link behind # is a heading of the page that it leads to."""
    links = [(page, *link) for page in PAGES for link in HEADING_LINK.findall(page.read_text())]
    refuse(
        f"{name(page)} leads to {target}#{heading}"
        for page, target, heading in links
        if heading not in _headings(page.parent / target if target else page)
    )


@cache
def _headings(page: Path) -> set[str]:
    """The headings of a page as links name them: in lower case, with hyphens for blanks and no other signs."""
    text = re.sub(r"```.*?```", "", page.read_text() if page.is_file() else "", flags=re.S)
    return {
        re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in re.findall(r"^#+ (.*)$", text, re.M)
    }


def test_modules_name_files_that_exist():
    """A docstring or a comment that sends its reader to another file names one, by its path or by its end."""
    files = [f"/{name(path)}" for path in tracked("*.py", "*.md")]
    named = [(path, file) for path in PRODUCT_SOURCES for file in NAMED_FILE.findall(path.read_text())]
    refuse(
        f"{name(path)} names {file}" for path, file in named if not any(known.endswith(f"/{file}") for known in files)
    )


def test_prose_is_plain():
    """One idea, one sentence; a paragraph that fills the screen is two paragraphs."""
    refuse(f"{name(page)}: {fault}" for page in PROSE for fault in _dense(page))


def _dense(page: Path) -> Iterator[str]:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    text = re.sub(r"`[^`]*`", "X", re.sub(r"(?m)^(    .*|\|.*|#.*)$", "", text))
    sentences = [
        sentence
        for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z*X])", re.sub(r"\s+", " ", text))
        if len(sentence.split()) > 2
    ]
    semicolons = sum(sentence.count(";") for sentence in sentences)
    if semicolons > SEMICOLONS_A_SENTENCE_MAX * len(sentences):
        yield f"{semicolons} semicolons in {len(sentences)} sentences"
    for paragraph in re.split(r"\n\s*\n", text):
        if len(paragraph.split()) > PARAGRAPH_WORDS_MAX:
            yield f"a long paragraph: {paragraph.strip()[:60]}"


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


def test_unit_tests_do_not_sleep():
    """A clock is passed in. `sleep(0)` is a turn of the event loop. The list names nothing that is gone."""
    sleeping = {name(path) for path in UNIT_TESTS if re.search(r"\b(?:time|asyncio)\.sleep\((?!0\))", path.read_text())}
    refuse(
        [f"{file} sleeps" for file in sleeping - SLEEPS.keys()]
        + [f"{file} doesn't sleep: SLEEPS names it" for file in SLEEPS.keys() - sleeping]
    )


def test_tests_wait_in_one_way():
    """Until something holds, with one limit, and what was seen last. The list names nothing that is gone."""
    clock = re.compile(r"time\.monotonic\(\) [<>] (?!=)|asyncio\.timeout\(")
    otherwise = {name(path) for path in TESTS if clock.search(path.read_text())} - {"tests/waiting.py"}
    refuse(
        [f"{file} waits otherwise than tests/waiting.py" for file in otherwise - WAITS_OTHERWISE.keys()]
        + [f"{file} doesn't: WAITS_OTHERWISE names it" for file in WAITS_OTHERWISE.keys() - otherwise]
    )


def test_randomness_has_a_seed():
    """`random.choice` and its like draw from a seed that nobody knows. The one of tests/seed.py is printed."""
    refuse(
        f"{name(path)} uses random.{used}"
        for path in TESTS
        for used in _random_names(path) - {"Random", "SystemRandom"}
    )


def _random_names(path: Path) -> set[str]:
    """What a file takes from the module `random`, if it imports it."""
    modules = [alias.name for node in nodes(path) if isinstance(node, ast.Import) for alias in node.names]
    if "random" not in modules:
        return set()
    return {
        node.attr
        for node in nodes(path)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "random"
    }


def test_locks_name_no_registry():
    """A lock names packages, versions and hashes, never an address."""
    for path in tracked("*.lock"):
        assert not re.search(r"https?://", path.read_text()), name(path)


def test_unsteady_tests_have_a_row_each():
    """A row of tests/UNSTEADY.md has a date, a test that exists, what was seen, and what is known of the cause."""
    table = [line for line in (ROOT / "tests" / "UNSTEADY.md").read_text().splitlines() if line.startswith("|")]
    assert table[:2] == ["| when | test | what was seen | what is known of the cause |", "|---|---|---|---|"]
    refuse(f"not the form of a row: {row}" for row in table[2:] if not _is_unsteady_row(row))


def _is_unsteady_row(row: str) -> bool:
    form = re.fullmatch(r"\| \d{4}-\d\d-\d\d \| `([^`:]+\.py)(?:::(\w+)[^`]*)?` \| \S[^|]* \| \S[^|]* \|", row)
    if form is None or not (ROOT / form[1]).is_file():
        return False
    return form[2] is None or f"def {form[2]}(" in (ROOT / form[1]).read_text()
