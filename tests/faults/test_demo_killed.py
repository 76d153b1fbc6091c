"""The demo of the README, with kill -9 of every process of its stack while the flights are loaded.

The demo judges itself: it ends with 0 only where every line of its report holds, the clean audit among them.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.recording import BEGUN, kill_each_once
from schemaless.config import StackSettings
from schemaless.stack import embedded
from tests.seed import seeded

pytestmark = [
    pytest.mark.faults,
    pytest.mark.timeout(2700),
    pytest.mark.skipif(not os.environ.get("SCHEMALESS_FAULTS_LONG"), reason="takes many minutes: `make faults`"),
]

ROOT = Path(__file__).parents[2]


def test_every_line_of_the_demo_holds_though_every_process_is_killed(tmp_path_factory):
    """I1, I5, I7, I9, I10, I11, I12: servers, services and programs, those of the incident among them."""
    folder = tmp_path_factory.mktemp("demo")
    home, output = folder / "home", folder / "output"
    env = os.environ | {"SCHEMALESS_HOME": str(home), "PYTHONUNBUFFERED": "1"}
    try:
        with output.open("w") as file:
            argv = [sys.executable, "-m", "schemaless", "demo"]
            demo = subprocess.Popen(argv, cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT, text=True)
        while BEGUN not in output.read_text():
            assert demo.poll() is None, output.read_text()
            time.sleep(0.2)
        said: list[str] = []
        kill_each_once(home, seeded("kills of the demo"), lambda: demo.poll() is not None, said.append)
        killed = {line.partition("# ")[2] for line in said if line.startswith("kill")}
        assert {"kafka", "tailer-0", "indexer-0", "a1", "flights-billing"} <= killed, said
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
