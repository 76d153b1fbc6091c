"""An embedded stack from the page alone: the four incidents of docs/decisions.md, and a switch of a master.

Each incident is walked from the overview to its cause and its remedy: an order that the page offers, or a command that
it prints, which is run as it was printed.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Locator

from tests.integration.api.api_harness import ROOT
from tests.integration.ui.conftest import WAIT_MS, Tab, opened

pytestmark = pytest.mark.timeout(600)

PROGRAM = """
from schemaless import RetryPolicy, trigger

@trigger(column="BASE", retry=RetryPolicy(attempts=2, delay=0.05))
def bill_rider(cell):
    if cell.body["card"] == "blocked":
        raise ValueError(f"the card of {cell.body['rider']} is blocked")
"""
"""A cell of a blocked card is a poison cell."""


@dataclass(frozen=True)
class Stack:
    folder: Path
    environment: dict[str, str]
    base: str = ""

    def command(self, line: str) -> None:
        """Runs a line as a person would, such as one that the page prints."""
        program, *arguments = shlex.split(line)
        assert program == "schemaless"
        subprocess.run(
            [sys.executable, "-m", "schemaless", *arguments], cwd=ROOT, env=self.environment, check=True, timeout=400
        )

    def put(self, card: str = "4711") -> None:
        body = {"card": card, "rider": "ada"}
        answer = httpx.put(f"{self.base}/v1/mezzanine/cells/{uuid.uuid4()}/BASE/1", json=body, timeout=20)
        assert answer.status_code in (201, 202), answer.text


@pytest.fixture(scope="module")
def stack(tmp_path_factory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("stack")
    environment = os.environ | {"SCHEMALESS_HOME": str(folder / "home"), "SCHEMALESS_WARM_UP_S": "0"}
    made = Stack(folder, environment)
    try:
        made.command("schemaless up")
        yield Stack(folder, environment, json.loads((folder / "home/endpoints.json").read_bytes())["api"][0])
    finally:
        made.command("schemaless down")


@dataclass
class Walk:
    """The way of a person from the overview. `clicks` counts the links, buttons and fields that it took."""

    tab: Tab
    name: str
    clicks: int = 0
    began: float = field(default_factory=time.monotonic)

    def click(self, target: Locator) -> None:
        target.click()
        self.clicks += 1

    def ends(self) -> None:
        """The cause and the remedy are on the screen."""
        took = time.monotonic() - self.began
        print(f"{self.name}: {self.clicks} clicks, {took:.1f} s; 60 s are aimed at on a quiet machine")
        if folder := os.environ.get("SCHEMALESS_TEST_PICTURES"):
            self.tab.page.screenshot(path=Path(folder) / f"incident-{self.name}.png", full_page=True)

    def printed_command(self) -> str:
        """Returns the command of the first cause on the overview."""
        return self.tab.text(".tile:first-child .cause .remedy code")


@pytest.fixture
def walk(browser, stack):
    """walk("a name") opens the overview of a stack in which something is wrong. It is whole again afterwards."""

    @contextmanager
    def walking(name: str) -> Iterator[Walk]:
        with opened(browser, stack.base) as tab:
            tab.go("overview/mezzanine").see("Is it running?")
            yield Walk(tab, name)
            tab.go("overview/mezzanine")
            tab.until(lambda: tab.text(".tile .answer") == "Yes")

    return walking


def test_kafka_is_down(stack, walk):
    """The first tile says that nothing is published, and prints the command that starts the broker."""
    stack.command("schemaless down kafka")
    stack.put()
    with walk("kafka") as way:
        way.tab.see("nothing is published (no kafka): no broker of Kafka answers")
        command = way.printed_command()
        way.ends()
        assert command == "schemaless up kafka"
        stack.command(command)


def test_a_datastore_is_paused(stack, walk):
    """The first tile says so, and prints the command that resumes."""
    stack.command("schemaless tailer pause mezzanine")
    stack.put()
    with walk("paused") as way:
        way.tab.see("tailing is paused, so nothing is published")
        command = way.printed_command()
        way.ends()
        assert command == "schemaless tailer resume mezzanine"
        stack.command(command)


def test_a_master_is_dead(stack, walk):
    """The controller has another one already. The overview names the dead server, and how it is started again."""
    stack.command("schemaless down b1")
    stack.put()
    with walk("master") as way:
        way.tab.see("minion b1 of cluster b doesn't answer")
        command = way.printed_command()
        assert re.search(r"b[23]\s+master\s+yes", way.tab.text("[aria-label='Servers of b']"))
        way.ends()
        assert command == "schemaless up b1"
        stack.command(command)


def test_a_cell_is_poison(stack, walk):
    """One link leads to the program, which shows the error and offers a retry once the program is corrected."""
    program = stack.folder / "billing.py"
    program.write_text(PROGRAM)
    run = [sys.executable, "-m", "schemaless", "triggers", "run", str(program), "--watch", "--from", "beginning"]
    output = stack.folder / "billing.out"
    with output.open("wb") as file:
        worker = subprocess.Popen(run, cwd=ROOT, env=stack.environment, stdout=file, stderr=file)
    try:
        stack.put("blocked")
        with walk("poison") as way:
            tab = way.tab
            way.click(tab.page.get_by_role("link", name="1 cell parked by billing"))
            tab.see("1 parked cell matches").see("ValueError: the card of ada is blocked")
            tab.see("Correct the program")
            way.ends()
            program.write_text(PROGRAM.replace('"blocked"', '"lost"'))
            tab.until(lambda: output.read_text().count("the program begins") == 2)  # or the first one may retry it
            way.click(tab.page.get_by_role("button", name="Retry all that match…"))
            tab.see("1 parked cell would be called again.")
            way.click(tab.page.locator("dialog button.main"))
            tab.see("1 of 1 done")
    finally:
        worker.terminate()
        worker.wait(120)
        print(output.read_text())


def test_a_master_is_switched_from_the_page(stack, browser):
    """A preview, an order that waits for a controller, its end, and the new master and its epoch on the map."""
    servers = "[aria-label='Servers of a']"

    def epoch(tab: Tab) -> int:
        said = tab.text("section[aria-label=Installation] .card")
        return int(re.search(r"epoch (\d+), generations? [\d to]+,", said)[1])

    with opened(browser, stack.base) as tab:
        tab.go("overview/mezzanine").see("Cluster a")
        before = epoch(tab)
        assert re.search(r"a1\s+master\s+yes", tab.text(servers))
        tab.page.get_by_role("button", name="Switch the master").first.click()
        tab.page.select_option("#order-node", "a2")
        tab.page.click("text=Show what it would do")
        tab.see("a1 is the master of a, and nothing was ordered.").see("a2 is 0 s behind")
        stack.command("schemaless down controller-0")
        tab.page.locator("dialog button.main").click()
        tab.see("It is ordered. No controller has settled it yet.")
        stack.command("schemaless up controller-0")
        tab.page.get_by_text("a2 is the master of a.").wait_for(timeout=WAIT_MS)
        assert tab.page.locator("dialog .problem").count() == 0
        tab.page.get_by_role("button", name="Close").click()
        tab.until(lambda: re.search(r"a2\s+master\s+yes", tab.text(servers)))
        assert epoch(tab) > before
    stack.put()
