"""A real browser before a real installation. A page that loads from elsewhere, or that has a fault, fails its test."""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
from axe_playwright_python.base import AXE_SCRIPT
from playwright.sync_api import Browser, Page, sync_playwright

from tests.integration.ui.stage import Installation, installation

WAIT_MS = 120_000
EXPECTED = ("Failed to load resource", "net::ERR_")
"""What a browser says of an answer that is no success, and of an API that is away: some tests bring that about."""


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Iterator[Installation]:
    """Ends with the module: its processes would take a tenth of a core from all tests that follow."""
    with installation(tmp_path_factory.mktemp("ui")) as made:
        yield made


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Ends with the module: Playwright keeps an event loop in its thread, beside which no async test can run."""
    found = shutil.which("chromium")
    assert found, "the tests of the page need Chromium: deploy/install-servers browser"
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield started
        started.close()


OpenPage = Callable[..., "Tab"]


class Tab:
    """One open page. `see` waits until a text is shown."""

    def __init__(self, page: Page, base: str) -> None:
        self.page = page
        self.base = base

    def go(self, place: str) -> "Tab":
        self.page.goto(f"{self.base}/ui#/{place}")
        return self

    def see(self, text: str) -> "Tab":
        self.page.get_by_text(text).first.wait_for(timeout=WAIT_MS)
        return self

    def text(self, selector: str) -> str:
        found = self.page.locator(selector).first
        found.wait_for(timeout=WAIT_MS)
        return found.inner_text()

    def until(self, holds: Callable[[], bool]) -> None:
        """Waits until something holds. The page's policy lets nobody wait inside of it."""
        deadline = time.monotonic() + WAIT_MS / 1000
        while not holds():
            assert time.monotonic() < deadline, self.page.inner_text("body")[:5000]
            self.page.wait_for_timeout(100)

    def violations(self) -> list[str]:
        """What axe-core finds: the rule, and where it is broken."""
        self.page.evaluate(AXE_SCRIPT)
        found = self.page.evaluate("axe.run()")["violations"]
        return [f"{one['id']}: {node['html'][:150]} {node['failureSummary']}" for one in found for node in one["nodes"]]


@contextmanager
def opened(browser: Browser, base: str, **options: object) -> Iterator[Tab]:
    """A page in a browser profile of its own, that fails its test for each fault of its own."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda said: faults.append(said.text) if said.type in ("error", "warning") else None)
    page.on("dialog", lambda dialog: (faults.append(f"a dialog: {dialog.message}"), dialog.dismiss()))
    page.on("request", lambda asked: asked.url.startswith((base, "data:")) or faults.append(f"asked for {asked.url}"))
    try:
        yield Tab(page, base)
    finally:
        context.close()
    assert [fault for fault in faults if not any(known in fault for known in EXPECTED)] == []


@pytest.fixture
def open_page(browser, installed) -> Iterator[OpenPage]:
    """open_page("overview/trips", color_scheme="dark", token="read") -> a Tab. Without a token nobody is signed in."""
    with ExitStack() as stack:

        def make(place: str = "", token: str | None = "admin", port: int | None = None, **options: object) -> Tab:
            base = f"http://127.0.0.1:{port or installed.api.port}"
            tab = stack.enter_context(opened(browser, base, **options))
            if token is not None:
                tab.page.add_init_script(f"sessionStorage.setItem('schemaless token', '{installed.tokens[token]}')")
            return tab.go(place)

        yield make
