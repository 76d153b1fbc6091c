"""What README and docs show to be pasted does what it is shown for, in page order, on a stack of `schemaless up`.

Commands run in a shell, and blocks of Python in one namespace for each page. Pages that a reader takes one after the
other share their state. The others run beside them. What isn't run is listed with the reason.
"""

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
from typing import Any

import httpx
import pytest

from schemaless import AsyncClient, Client
from schemaless.cli.targets import stack_token
from schemaless.config import StackSettings
from schemaless.demo.loader import Flight, LoadCount, Loader
from schemaless.stack import embedded, supervision
from tests.acceptance.pages import PAGES, ROOT, Step, steps_of
from tests.waiting import until

TOGETHER = [["README.md", "client.md", "triggers.md", "parked.md"], ["demo.md", "indexes.md"]]
LAST_PAGE = "security.md"  # once a token exists, every request needs one
NOT_RUN = {
    r"\.venv/bin/python -m bench": "measures for an hour",
    r"kcat ": "not installed everywhere: tests/integration/bus reads the same bytes with a plain consumer",
    r"curl http://127\.0\.0\.1:8000/readyz": "of containers: tests/acceptance/test_compose_file.py",
}
CONNECTED = ""
FOLLOWS = {
    r"schemaless triggers run examples/ride.py": "billed 12.5",
    r"schemaless triggers run": "Ctrl-C ends it",
    r"schemaless log .*--follow": CONNECTED,
    r"schemaless tail (?!.*--no-follow)": CONNECTED,
    r"python -m consumers\.probe": "acknowledged_ms",
}
"""What follows the log until Ctrl-C, and what it has printed before the reader goes on.

What is CONNECTED may print nothing, and has a connection.
"""

TRIP = "5b1d5b2e-8d5a-4a3e-9a53-4f0f6a3f2a11"
FLIGHT = {"tailnum": "N14228", "time_hour": "2013-01-01T05:00:00Z", "carrier": "UA", "flight": 1545}
ASSUMED: dict[str, Any] = {
    "stored_positions": {},
    "charge": lambda trip, key: None,
    "find_charge": lambda key: None,
    "send_mail": lambda trip: None,
}
"""What blocks of Python use and their pages don't make."""

OUTSIDE = {"testing-triggers.md": "tests of pytest: tests/unit/examples/test_billing.py has them"}
AT_ONCE = 3

pytestmark = pytest.mark.timeout(480)


def has_socket(pid: int) -> bool:
    try:
        return any(os.readlink(each).startswith("socket:") for each in Path(f"/proc/{pid}/fd").iterdir())
    except FileNotFoundError:  # a file that was closed meanwhile
        return False


class Reader:
    """Somebody who pastes pages, one step after the other, and ends what follows the log with Ctrl-C at the end."""

    def __init__(self, folder: Path, environment: dict[str, str], addresses: dict[str, str]) -> None:
        self._folder = folder
        self._environment = environment
        self._addresses = addresses
        self._following: list[tuple[Step, subprocess.Popen[bytes], Path]] = []
        self._printed = ""

    def paste(self, pages: list[list[Step]]) -> None:
        try:
            for steps in pages:
                values = {"__name__": "page", **ASSUMED}
                values["store"] = partial(_stop_subscriber, values)
                for step in steps:
                    if step.kind == "shell":
                        self._command(step)
                    elif step.kind == "python" and step.page not in OUTSIDE:
                        exec(compile(step.text, f"{step.page}:{step.line}", "exec"), values)
                for client in [value for value in values.values() if isinstance(value, Client)]:
                    client.close()
            self._interrupt()
        finally:
            for _, process, _ in self._following:
                process.kill()
                process.wait()

    def _command(self, step: Step) -> None:
        if any(re.match(words, step.text) for words in NOT_RUN):
            return
        text = self._filled(step.text)
        follows = [shown for words, shown in FOLLOWS.items() if re.match(words, text)]
        if follows:
            return self._follow(step, text, follows[0])

        def ended() -> subprocess.CompletedProcess[str] | None:
            done = subprocess.run(
                ["bash", "-c", text], cwd=self._folder, env=self._environment, capture_output=True, text=True,
                timeout=120, check=False,
            )  # fmt: skip
            if "no trigger program" not in done.stderr:
                return done
            time.sleep(1)  # the program that was started a moment ago is known once it has its partitions
            return None

        done = until(ended)
        self._printed = done.stdout
        assert done.returncode == 0, (str(step), done.stdout, done.stderr)

    def _follow(self, step: Step, text: str, shown: str) -> None:
        output = self._folder / f"{step.page}-{step.line}.out"
        with output.open("wb") as file:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {text}"], cwd=self._folder, env=self._environment, stdout=file, stderr=file
            )
        self._following.append((step, process, output))

        def has_begun() -> bool:
            assert process.poll() is None, (str(step), output.read_text())
            return shown in output.read_text() and (shown != CONNECTED or has_socket(process.pid))

        until(has_begun, lambda: (str(step), output.read_text()))

    def _interrupt(self) -> None:
        for step, process, output in self._following:
            if process.poll() is None or "--limit" not in step.text:
                assert process.poll() is None, (str(step), output.read_text())
                process.send_signal(signal.SIGINT)
        for step, process, output in self._following:
            assert process.wait(30) == 0, (str(step), output.read_text())

    def _filled(self, text: str) -> str:
        """Puts in what differs from stack to stack: addresses, and a job that the command before printed."""
        for usual, ours in self._addresses.items():
            text = text.replace(usual, ours)
        if (job := re.search(r"\b[0-9a-f]{16}\b", self._printed)) is not None:
            text = re.sub(r"(?<=index job )[0-9a-f]{16}\b", job[0], text)
        if "$SCHEMALESS_TOKEN" in text:
            text = text.replace("$SCHEMALESS_TOKEN", stack_token() or "")
        text = re.sub(r"^curl ", "curl --silent --show-error --fail-with-body ", text)
        return text.replace("--offset 3:1000", "--offset 3:0")  # of a topic as short as a test's


def _stop_subscriber(values: dict[str, Any], _position: object) -> None:
    values["subscriber"].stop()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A stack with all its services, the datastore of the demo, and the files that the pages name."""
    folder = tmp_path_factory.mktemp("documented")
    settings = StackSettings(home=folder / "home", warm_up_s=0)
    try:
        embedded.up(settings)
        shutil.copytree(ROOT / "examples", folder / "examples")
        shutil.copytree(ROOT / "deploy", folder / "deploy")
        for page in PAGES:
            for step in steps_of(page):
                if step.kind == "yaml" and (name := re.match(r"# (\w+\.yaml)\n", step.text)):
                    (folder / name[1]).write_text(step.text)
        run(folder, ["datastore", "create", "flights", "--shards", "64", "--partitions", "8"])
        run(folder, ["index", "create", "by_tail.yaml", "--datastore", "flights"])
        run(folder, ["index", "wait", "flights_by_tailnum", "--datastore", "flights"])
        with Client(hosts(folder), datastore="flights") as client:
            client.put_cell(TRIP, "BASE", 1, FLIGHT)
        yield folder
    finally:
        embedded.down(settings)
        shutil.rmtree(folder, ignore_errors=True)


def endpoints(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "home" / "endpoints.json").read_bytes())


def hosts(folder: Path) -> list[str]:
    return endpoints(folder)["api"]


def environment(folder: Path) -> dict[str, str]:
    """That of a shell in which the README's `. .venv/bin/activate` was done."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SCHEMALESS_")}
    mine = {"SCHEMALESS_HOME": str(folder / "home"), "SCHEMALESS_WARM_UP_S": "0", "PYTHONPATH": str(ROOT)}
    return {**kept, **mine, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def reader(folder: Path, **more: str) -> Reader:
    addresses = {
        "localhost:8000": hosts(folder)[0].removeprefix("http://"),
        "127.0.0.1:9092": endpoints(folder)["kafka"],
    }
    return Reader(folder, environment(folder) | more, addresses)


def run(folder: Path, arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "schemaless", *arguments], cwd=folder, env=environment(folder), capture_output=True,
        text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (arguments, done.stdout, done.stderr)


def test_what_the_pages_show_runs_as_pasted_in_their_order(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """STYLE: a command ends with 0, what follows the log does so at Ctrl-C, and a block of Python raises nothing."""
    monkeypatch.setenv("SCHEMALESS_HOME", str(home / "home"))
    by_page = {page.name: steps_of(page) for page in PAGES if page.name != LAST_PAGE}
    assert sum(map(len, by_page.values())) > 60
    grouped = {name for group in TOGETHER for name in group}
    groups = [*TOGETHER, [name for name in by_page if name not in grouped]]
    with ThreadPoolExecutor(len(groups)) as pool:
        pasted = [pool.submit(reader(home).paste, [by_page[name] for name in group]) for group in groups]
    assert "\n\n".join(str(error) for each in pasted if (error := each.exception()) is not None) == ""


def test_the_readme_shows_its_example_to_the_letter() -> None:
    """The file that its commands run."""
    (block,) = [step for step in steps_of(ROOT / "README.md") if step.kind == "python"]
    title, _, shown = block.text.partition("\n")
    assert (ROOT / title.removeprefix("# ")).read_text().endswith(shown)


def test_every_step_that_is_not_run_has_a_reason() -> None:
    """A pattern that matches nothing any more is dropped."""
    texts = [step.text for page in PAGES for step in steps_of(page) if step.kind == "shell"]
    assert [words for words in NOT_RUN if not any(re.match(words, text) for text in texts)] == []


def test_commands_loader_and_programs_work_once_a_token_exists(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I17: the stack keeps a token of its own. It comes last, because access never goes off again."""
    api = hosts(home)[0]
    monkeypatch.setenv("SCHEMALESS_HOME", str(home / "home"))
    reader(home).paste([steps_of(ROOT / "docs" / LAST_PAGE)])
    until(lambda: httpx.get(f"{api}/v1/mezzanine/shards").status_code == 401)
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
