"""The listener that keeps endpoints.json true speaks a protocol on its standard output, and nothing else gets there."""

import subprocess
import sys

EVENT = "ver:3.0 server:s serial:1 pool:endpoints poolserial:1 eventname:TICK_5 len:0\n"
NOISY = """
import sys
import structlog
from schemaless.errors import StorageUnavailable
from schemaless.stack import endpoints

def refresh(home):
    print("a library's print")
    structlog.get_logger().warning("a library's warning")
    raise StorageUnavailable("no master answers")

endpoints.refresh_endpoints = refresh
sys.argv = ["listener", "/nowhere"]
endpoints.main()
"""


def test_a_library_that_prints_does_not_break_the_protocol():
    """Two events are answered although each is accompanied by a print, a warning and a failure: all on stderr."""
    command = [sys.executable, "-c", NOISY]
    done = subprocess.run(command, input=EVENT * 2, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.startswith("READY\nRESULT 2\nOKREADY\nRESULT 2\nOKREADY\n")
    assert done.stderr.count("a library's warning") == 2
    assert "no master answers" in done.stderr
