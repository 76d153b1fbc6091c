"""The wheel, installed in empty environments: what it brings, what it names, and a trigger program that it runs.

An environment gets the wheel by pip, and links to exactly the packages that its metadata asks for, at the versions of
requirements.lock: so the test needs no registry. `pip check` confirms that nothing is missing.
"""

import json
import os
import subprocess
import sys
import uuid
import venv
from collections.abc import Mapping
from importlib.metadata import PathDistribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from schemaless.bus.topics import ensure_topics
from tests.integration.api.api_harness import api_process
from tests.log_harness import running_tailers
from tests.waiting import until

ROOT = Path(__file__).parents[2]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
PACKAGES_MAX = 30
EXTRAS_ONLY = ("aiokafka", "asyncmy", "confluent_kafka", "fastapi", "faust", "mode", "pymysql", "uvloop")
CHECKOUT = "run it in a checkout of the project, after `make venv`, or in its image"
NAMED = {
    "tail": "`schemaless tail` needs Kafka: pip install 'schemaless-store[kafka]'",
    "audit": "`schemaless audit` needs Kafka and MySQL: pip install 'schemaless-store[kafka,mysql]'",
    "datastore list": "`schemaless datastore list` needs Kafka and MySQL: pip install 'schemaless-store[kafka,mysql]'",
    "tailer status": "`schemaless tailer status` needs Kafka and MySQL: pip install 'schemaless-store[kafka,mysql]'",
    "triggers remove census": "`schemaless triggers remove` needs MySQL: pip install 'schemaless-store[mysql]'",
    "triggers run census": (
        "`schemaless triggers run` needs Kafka, MySQL and Faust: pip install 'schemaless-store[triggers]'"
    ),
    "up": f"the services are not part of the installed package, so there is nothing to start ({CHECKOUT})",
    "demo": f"the services are not part of the installed package, so there is nothing to start ({CHECKOUT})",
}
CLIENT = """
import importlib.util, sys, uuid
import schemaless

hosts, datastore = sys.argv[1:3]
assert not [name for name in sys.argv[3:] if importlib.util.find_spec(name)]
with schemaless.Client([hosts], datastore=datastore) as client:
    row = uuid.uuid4()
    assert client.put_cell(row, "BASE", 1, {"fare": 12}).status == "stored"
    assert client.get_cell(row, "BASE", 1).fare == 12
    try:
        client.put_cell(row, "BASE", 1, {"fare": 13})
    except schemaless.Conflict:
        print("conflict")
try:
    from schemaless import Subscriber
except ImportError as error:
    print(error)
"""
CENSUS = """
import os, pathlib
from schemaless import trigger

CALLS = os.open(pathlib.Path(__file__).parent / "calls", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

@trigger(column="BASE")
def count(cell):
    os.write(CALLS, f"{cell.row_key}\\n".encode())
"""

KIT = """
import sys
import wheel_census
from schemaless.testing import TriggerKit

with TriggerKit(wheel_census) as kit:
    kit.put("5b1d5b2e-8d5a-4a3e-9a53-4f0f6a3f2a11", "BASE", {})
    kit.deliver()
    assert kit.counts.called == 1
assert "pytest" not in sys.modules
"""

APPLICATION = """
import asyncio
import uuid
from collections.abc import Mapping
from typing import Any

from schemaless import (
    AsyncClient, Client, Conflict, Context, Park, Retry, RetryPolicy, SchemalessError, TriggerCell, Unavailable, trigger
)

Trip = Mapping[str, Any]

def write(client: Client, trip: uuid.UUID) -> str:
    try:
        return client.put_cell(trip, "BASE", 1, {"fare": 12.5}).status
    except Conflict as error:
        return f"{error} {error.hint}"
    except (Unavailable, SchemalessError) as error:
        return str(error.retryable)

def read(client: Client, trip: uuid.UUID) -> Trip | None:
    cell = client.get_cell_latest(trip, "BASE")
    if cell:
        number: int = cell.ref_key
        return {**cell.body, "number": number}
    return None

def of_driver(client: Client, driver: uuid.UUID) -> list[uuid.UUID]:
    return [entry.row_key for entry in client.index("by_driver").entries(driver=str(driver), order="created")]

@trigger(column="BASE", retry=RetryPolicy(attempts=3), park="cell", where="fare > 10", parallel=4)
def bill(cell: TriggerCell, context: Context) -> None:
    if context.attempt > 1:
        raise Retry(5.0)
    raise Park(f"no card for {cell.row_key} at {cell.location}")

@trigger(column="STATUS")
async def notify(row_key: uuid.UUID) -> None:
    async with AsyncClient(datastore="mezzanine") as client:
        cells = await asyncio.gather(*(client.get_cell(row_key, "BASE", n) for n in (1, 2)))
        print([cell.body for cell in cells if cell])
"""
MISTAKE = """
from schemaless import Client

Client(datastore="mezzanine").put_cel("row", "BASE", 1, {})
"""
EVERY_COMMAND = """
import contextlib, io, pathlib, sys
import typer
from schemaless import __main__ as command

GIVEN = {
    "row_key": "5b1d5b2e-8d5a-4a3e-9a53-4f0f6a3f2a11", "row": "5b1d5b2e-8d5a-4a3e-9a53-4f0f6a3f2a11", "ref_key": "1",
    "body": "{}", "shard": "1", "to": "end", "terms": "a=1", "chosen": "all", "location": "1:1", "module": "app.py",
    "cells_per_s": "5", "scope": "read", "file": "x.yaml",
}

def commands(group, path=()):
    for name, each in group.commands.items():
        yield from commands(each, (*path, name)) if hasattr(each, "commands") else [((*path, name), each)]

pathlib.Path("x.yaml").write_text("name: x")
for path, each in commands(typer.main.get_command(command.app)):
    sys.argv = ["schemaless", *path]
    for wanted in each.params:
        if wanted.required:
            flag = [] if wanted.param_type_name == "argument" else [wanted.opts[0]]
            sys.argv += [*flag, GIVEN.get(wanted.name, "x")]
    printed, status = io.StringIO(), 0
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            command.main()
        except SystemExit as end:
            status = end.code or 0
    print(" ".join(path), status, printed.getvalue().replace(chr(10), chr(92) + "n"), sep=chr(9))
"""

pytestmark = pytest.mark.timeout(180)


class InstalledWheel:
    """A virtual environment with the wheel and the packages of some extras, far from the checkout."""

    def __init__(self, folder: Path, wheel: Path, *extras: str) -> None:
        self._bin = folder / "venv" / "bin"
        self.python = self._bin / "python"
        self.work = folder / "work"
        self.work.mkdir(parents=True)
        venv.create(folder / "venv", symlinks=True)
        run([*PIP, "--python", str(self.python), "install", "--no-index", "--no-deps", str(wheel)])
        (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
        (installed,) = site.glob("schemaless_store-*.dist-info")
        self.packages = needed(PathDistribution(installed).requires or [], set(extras))
        for package in self.packages:
            link_package(package, site)
        run([*PIP, "--python", str(self.python), "check"])

    def start(self, command: list[str], settings: Mapping[str, object] | None = None) -> subprocess.Popen[str]:
        """Starts one of the environment's programs, with these settings and none of the checkout's paths."""
        env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SCHEMALESS"))}
        env |= {f"SCHEMALESS_{name.upper()}": str(value) for name, value in (settings or {}).items()}
        argv = [str(self._bin / command[0]), *command[1:]]
        return subprocess.Popen(argv, cwd=self.work, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def output(self, command: list[str]) -> str:
        """Runs a program that must succeed, and returns what it prints on both streams."""
        return output_of(self.start(command))


def output_of(process: subprocess.Popen[str]) -> str:
    printed, errors = process.communicate(timeout=120)
    assert process.returncode == 0, (process.args, printed, errors)
    return printed + errors


def needed(requirements: list[str], extras: set[str]) -> set[str]:
    """The packages that these requirements ask for, and theirs in turn."""
    found: set[tuple[str, str]] = set()
    waiting = [(text, extra) for text in requirements for extra in ("", *extras)]
    while waiting:
        text, extra = waiting.pop()
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        for wanted in ("", *requirement.extras):
            if (requirement.name, wanted) not in found:
                found.add((requirement.name, wanted))
                waiting += [(text, wanted) for text in distribution(requirement.name).requires or []]
    return {canonicalize_name(name) for name, _ in found}


def link_package(name: str, site: Path) -> None:
    for file in distribution(name).files or []:
        if ".." not in file.parts:  # a script of the checkout's environment
            (site / file).parent.mkdir(parents=True, exist_ok=True)
            (site / file).symlink_to(Path(str(file.locate())).absolute())


def run(command: list[str]) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, (command, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run([*PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)])
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def datastore(make_datastore, kafka):
    made = make_datastore(shards=4, partitions=2)
    ensure_topics(kafka, made)
    return made


@pytest.fixture(scope="module")
def hosts(running, datastore):
    with api_process(running.path) as started:
        yield f"http://127.0.0.1:{started.port}"


def test_the_wheel_alone_is_the_http_client(tmp_path: Path, wheel: Path, hosts, datastore):
    """Client and command line put and get without Kafka, Faust and MySQL drivers, and name what they lack."""
    installed = InstalledWheel(tmp_path, wheel)
    assert len(installed.packages) <= PACKAGES_MAX, sorted(installed.packages)
    printed = installed.output(["python", "-c", CLIENT, hosts, datastore.name, *EXTRAS_ONLY])
    assert printed == "conflict\nschemaless.Subscriber needs Kafka: pip install 'schemaless-store[kafka]'\n"
    row, target = str(uuid.uuid4()), ["--hosts", hosts, "--datastore", datastore.name]
    assert installed.output(["schemaless", "put", row, "BASE", "1", '{"fare": 7}', *target]).startswith("stored ")
    read = json.loads(installed.output(["schemaless", "get", row, "BASE", "1", "--json", *target]))
    assert read["body"] == {"fare": 7}
    assert row in installed.output(["schemaless", "log", str(read["shard"]), *target])
    assert "triggers" in installed.output(["schemaless", "--help"])
    ended = installed.output(["python", "-c", EVERY_COMMAND]).splitlines()
    told = {command: (status, text) for command, status, text in (line.split("\t") for line in ended)}
    assert len(told) > 50
    assert {command: text for command, (status, text) in told.items() if not is_a_sentence(status, text)} == {}
    refused = {command: installed.start(["schemaless", *command.split()]) for command in NAMED}
    printed = {command: "".join(process.communicate(timeout=120)) for command, process in refused.items()}
    assert printed == {command: f"error: {line}\n" for command, line in NAMED.items()}
    assert {process.returncode for process in refused.values()} == {1}


def is_a_sentence(status: str, text: str) -> bool:
    """A command that can do nothing here says why in one line. `shard-of` needs nothing, and succeeds."""
    return status == "0" or (status == "1" and text.startswith("error: ") and text.count("\\n") == 1)


def test_a_strict_type_checker_knows_the_wheel(tmp_path: Path, wheel: Path):
    """The types that a checkout has are in the wheel: py.typed. A wrong name is found."""
    installed = InstalledWheel(tmp_path, wheel, "triggers")
    for name, text in (("application.py", APPLICATION), ("mistake.py", MISTAKE)):
        (installed.work / name).write_text(text)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--python-executable",
        str(installed.python),
        "--no-incremental",
    ]
    checked = [
        subprocess.run([*command, name], cwd=installed.work, capture_output=True, text=True, timeout=150, check=False)
        for name in ("application.py", "mistake.py")
    ]
    assert (checked[0].returncode, checked[0].stdout) == (0, "Success: no issues found in 1 source file\n")
    assert 'has no attribute "put_cel"; maybe "put_cell"' in checked[1].stdout


def test_a_trigger_program_runs_from_the_wheel(tmp_path: Path, wheel: Path, running, kafka, hosts, datastore):
    """With the extra `triggers`: a program outside the checkout is called for every cell, and ends in order."""
    installed = InstalledWheel(tmp_path, wheel, "triggers")
    (installed.work / "wheel_census.py").write_text(CENSUS)
    calls = installed.work / "calls"
    installed.output(["python", "-c", f"import sys; sys.path.insert(0, ''){KIT}"])
    settings = {"topology": running.path, "kafka": kafka, "hosts": hosts}
    command = ["schemaless", "triggers", "run", "wheel_census", "--datastore", datastore.name]
    with running_tailers(1, running.path, kafka, datastore):
        program = installed.start(command, settings)
        try:
            rows = {str(uuid.uuid4()) for _ in range(3)}
            for row in rows:
                installed.output(
                    ["schemaless", "put", row, "BASE", "1", "{}", "--hosts", hosts, "--datastore", datastore.name]
                )

            def are_called() -> bool:
                assert program.poll() is None, program.communicate()
                return calls.exists() and rows <= set(calls.read_text().split())

            until(are_called)
        finally:
            program.terminate()
            output_of(program)
