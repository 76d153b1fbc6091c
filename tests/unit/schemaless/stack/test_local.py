"""A process that was halted does nothing more, whichever of its threads would."""

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from schemaless.stack.local import halt, halted

BUSY = """
import hashlib, threading
def work():
    while True:
        hashlib.pbkdf2_hmac("sha256", b"", b"", 100_000)
for _ in range(30):
    threading.Thread(target=work).start()
print("busy", flush=True)
"""


@pytest.fixture
def busy() -> Iterator[subprocess.Popen[bytes]]:
    """Thirty threads that never wait."""
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"busy\n"
        yield process
        process.kill()


def test_it_stands_as_soon_as_halt_returns(busy: subprocess.Popen[bytes]) -> None:
    """Every thread, each time; and after SIGCONT it runs again."""
    for _ in range(20):
        halt(busy.pid)
        assert halted(busy.pid)
        busy.send_signal(signal.SIGCONT)
        assert not halted(busy.pid)


def test_one_that_has_ended_is_not_halted(busy: subprocess.Popen[bytes]) -> None:
    """Neither as a zombie, nor when its parent has asked for its status."""
    busy.kill()
    busy.wait()
    assert not halted(busy.pid)
    with pytest.raises(ProcessLookupError):
        halt(busy.pid)
