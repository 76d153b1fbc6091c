"""The demo of the README, with kill -9 of every process of its stack while the flights are loaded.

The demo judges itself: it ends with 0 only where every line of its report holds, the clean audit among them.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from schemaless.config import StackSettings
from schemaless.errors import Unavailable
from schemaless.stack import embedded, supervision
from tests.seed import seeded

pytestmark = [
    pytest.mark.faults,
    pytest.mark.timeout(2700),
    pytest.mark.skipif(not os.environ.get("SCHEMALESS_FAULTS_LONG"), reason="takes many minutes: `make faults`"),
]

ROOT = Path(__file__).parents[2]
BEGUN = "cells loaded"  # the first line that the demo prints of its progress
RESTART_TIMEOUT_S = 120.0
PAUSE_S = (2.0, 8.0)


def pid_of(home, name):
    (found,) = [process for process in supervision.processes(home) if process.name == name]
    return found.pid


def until(holds, what, demo, timeout_s):
    """Waits while the demo runs. Returns what `holds` returned."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if found := holds():
                return found
        except Unavailable:
            pass  # the supervisor isn't there yet
        assert demo.poll() is None, "the demo has ended"
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


def kill_each_process_once(home, demo):
    """Kills in a seeded order, each when the one before it was started again. Returns the names."""
    names = [process.name for process in supervision.processes(home)]
    random = seeded("kills of the demo")
    random.shuffle(names)
    for name in names:
        pid = until(lambda name=name: pid_of(home, name), f"{name} is down", demo, RESTART_TIMEOUT_S)
        os.kill(pid, signal.SIGKILL)
        print(f"killed {name}", flush=True)
        until(
            lambda name=name, pid=pid: pid_of(home, name) not in (None, pid),
            f"{name} wasn't started again",
            demo,
            RESTART_TIMEOUT_S,
        )
        time.sleep(random.uniform(*PAUSE_S))
    return names


def test_every_line_of_the_demo_holds_though_every_process_is_killed(tmp_path_factory):
    """I1, I5, I7, I9, I10, I11, I12: servers, services and programs, those of the incident among them."""
    folder = tmp_path_factory.mktemp("demo")
    home, output = folder / "home", folder / "output"
    env = os.environ | {"SCHEMALESS_HOME": str(home), "PYTHONUNBUFFERED": "1"}
    try:
        with output.open("w") as file:
            argv = [sys.executable, "-m", "schemaless", "demo"]
            demo = subprocess.Popen(argv, cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT, text=True)
        until(lambda: BEGUN in output.read_text(), "nothing was loaded", demo, 600)
        names = kill_each_process_once(home, demo)
        assert {"kafka", "tailer-0", "indexer-0", "a-master", "flights-billing"} <= set(names), names
        demo.wait(timeout=1800)
        print(output.read_text())
        assert demo.returncode == 0
    finally:
        if demo.poll() is None:
            demo.kill()
            demo.wait()
        embedded.down(StackSettings(home=home))
        for data in ("mysql", "kafka"):  # the logs stay
            shutil.rmtree(home / data, ignore_errors=True)
