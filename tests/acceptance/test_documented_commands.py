"""The commands and the example of the README, and the commands of the docs, as they stand there, on the whole stack."""

import asyncio
import json
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import pytest

from schemaless import AsyncClient, Client
from schemaless.cli.targets import stack_token
from schemaless.config import StackSettings
from schemaless.demo.flights import Flight
from schemaless.demo.loader import LoadCount, Loader
from schemaless.stack import embedded, supervision

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = re.compile(r"^(?: {4})?(?:\.venv/bin/)?schemaless (?P<arguments>[a-z].*)$", re.MULTILINE)
TRIP = "5b1d5b2e-8d5a-4a3e-9a53-4f0f6a3f2a11"
FLIGHT = {"tailnum": "N14228", "time_hour": "2013-01-01T05:00:00Z", "carrier": "UA", "flight": 1545}
OFFSETS = {"3:1000": "3:0"}  # of a topic as short as a test's
FIRST = (
    "index create", "index wait", "index switch", "index drop flights_by_tailnum --version", "index verify",
    "index repair", "put",
)  # fmt: skip
LAST = (
    "tail", "triggers status", "triggers pause", "triggers seek", "triggers resume", "parked list", "parked retry",
    "parked discard", "triggers remove",
)  # fmt: skip
AT_ONCE = 3  # of those that need no order: a command is mostly the start of its interpreter
PROGRAM_TIMEOUT_S = 30.0

pytestmark = [pytest.mark.storage, pytest.mark.timeout(240)]


def documented() -> list[list[str]]:
    """Arguments of each command once, in the order of the pages.

    Those of access have a stack of their own (tests/integration/api/test_access.py): here every other one would need a
    token.
    """
    pages = [page for page in PAGES if page.name != "security.md"]
    found = [match["arguments"] for page in pages for match in COMMAND.finditer(page.read_text())]
    commands = dict.fromkeys(text.partition("#")[0].strip() for text in found)
    return [[OFFSETS.get(word, word) for word in shlex.split(text)] for text in commands]


def follows(arguments: list[str]) -> bool:
    return (
        arguments[:2] == ["triggers", "run"]
        or "--follow" in arguments
        or (arguments[0] == "tail" and "--no-follow" not in arguments)
    )


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A stack with all its services, in a folder with what the pages say is there."""
    folder = tmp_path_factory.mktemp("documented")
    settings = StackSettings(home=folder / "home", warm_up_s=0)
    try:
        embedded.up(settings)
        shutil.copytree(ROOT / "examples", folder / "examples")
        shutil.copy(ROOT / "examples" / "flights_by_tailnum.yaml", folder / "by_tail.yaml")
        changed = re.search(r"# by_tail_distance.yaml\n(.*?)```", (ROOT / "docs" / "indexes.md").read_text(), re.DOTALL)
        (folder / "by_tail_distance.yaml").write_text(changed[1])
        run(folder, ["datastore", "create", "flights", "--shards", "64", "--partitions", "8"])
        with Client(hosts(folder), datastore="flights") as client:
            client.put_cell(TRIP, "BASE", 1, FLIGHT)
        with Client(hosts(folder), datastore="mezzanine") as client:
            client.put_cell(TRIP, "BASE", 1, {"driver": "d-17"})
        yield folder
    finally:
        embedded.down(settings)
        shutil.rmtree(folder, ignore_errors=True)


def hosts(folder: Path) -> list[str]:
    return json.loads((folder / "home" / "endpoints.json").read_bytes())["api"]


def begin(folder: Path, arguments: list[str]) -> subprocess.Popen[str]:
    env = {**os.environ, "SCHEMALESS_HOME": str(folder / "home"), "PYTHONPATH": str(ROOT), "SCHEMALESS_WARM_UP_S": "0"}
    argv = [sys.executable, "-m", "schemaless", *arguments]
    return subprocess.Popen(argv, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(folder: Path, arguments: list[str]) -> None:
    process = begin(folder, arguments)
    output = process.communicate(timeout=60)
    assert process.returncode == 0, (arguments, output)


def await_program(folder: Path, status: list[str]) -> None:
    """Until the program that was started beside the other commands is known."""
    deadline = time.monotonic() + PROGRAM_TIMEOUT_S
    while True:
        asked = begin(folder, status)
        output = asked.communicate(timeout=60)
        if asked.returncode == 0:
            return
        assert time.monotonic() < deadline, output


def test_every_documented_command_does_what_it_is_shown_for(home: Path, request: pytest.FixtureRequest) -> None:
    """STYLE: what a page shows runs, and ends with 0; what follows the log ends with 0 when it is interrupted."""
    commands = documented()
    assert len(commands) > 25, commands
    following = [(arguments, begin(home, arguments)) for arguments in commands if follows(arguments)]
    request.addfinalizer(lambda: [process.kill() for _, process in following])
    once = [arguments for arguments in commands if not follows(arguments)]
    first, last = ([found for found in once if " ".join(found).startswith(words)] for words in (FIRST, LAST))
    for arguments in first:
        run(home, arguments)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(partial(run, home), [found for found in once if found not in first + last]))
    await_program(home, next(found for found in last if found[:2] == ["triggers", "status"]))
    for arguments in last:
        run(home, arguments)
    for arguments, process in following:
        if process.poll() is None or "--limit" not in arguments:
            assert process.poll() is None, (arguments, process.communicate())
            process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=30)
        assert process.returncode == 0, (arguments, output)


def test_the_readme_example_runs(home: Path) -> None:
    """The first thing that people copy."""
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert '".schemaless/endpoints.json"' in example
    code = example.replace(".schemaless/", f"{home}/home/").replace(TRIP, TRIP.replace("5b1d", "6c2e"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_commands_loader_and_programs_work_once_a_token_exists(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I17: the stack keeps a token of its own. It comes last, because access never goes off again."""
    api = hosts(home)[0]
    run(home, ["token", "create", "ada", "--datastore", "*", "--scope", "admin"])
    deadline = time.monotonic() + 10
    while httpx.get(f"{api}/v1/mezzanine/shards").status_code != 401:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    monkeypatch.setenv("SCHEMALESS_HOME", str(home / "home"))
    assert stat.S_IMODE((home / "home" / "token").stat().st_mode) == 0o600

    async def load() -> LoadCount:
        flights = [Flight(uuid.uuid4(), {"carrier": "UA"}, {"dep_delay": 0}) for _ in range(50)]
        async with AsyncClient(hosts(home), datastore="flights", token=stack_token()) as client:
            return await Loader(client, lambda count: None).load(flights)

    pids = {process.name: process.pid for process in supervision.processes(home / "home")}
    assert asyncio.run(load()).acknowledged == 100
    named = [f"put {TRIP} BASE 7 '{{}}'", f"latest {TRIP} BASE", "triggers list"]
    commands = ["status", *(f"{command} --datastore flights" for command in named), "audit flights"]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(partial(run, home), map(shlex.split, commands)))
    assert {process.name: process.pid for process in supervision.processes(home / "home")} == pids
