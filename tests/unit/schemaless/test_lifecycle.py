"""A service's end: in order on a signal, cut off when it doesn't finish, with a message when it fails."""

import signal
import subprocess
import sys
import textwrap
import time

import pytest

PROGRAM = """
import asyncio, sys
from schemaless.errors import Misconfigured
from schemaless.lifecycle import pause, run_service

async def serve(stop):
    print("ready", flush=True)
    {work}
    print("closed", flush=True)

sys.exit(run_service("test", serve, finish_timeout_s=0.5))
"""


@pytest.fixture
def service():
    """Starts a service with a body of its own; killed at the end."""
    started = []

    def start(work: str) -> subprocess.Popen:
        program = PROGRAM.format(work=textwrap.indent(work, "    ").strip())
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def ended(process: subprocess.Popen, number: signal.Signals | None = None) -> tuple[int, str]:
    """(exit status, output) after a signal that is sent once it is ready."""
    assert process.stdout.readline() == "ready\n"
    if number is not None:
        process.send_signal(number)
    output = process.stdout.read()
    return process.wait(10), output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_asks_and_the_work_ends_itself(service, number):
    """What is in hand is finished, then everything is closed, status 0."""
    assert ended(service("await stop.wait()\nawait asyncio.sleep(0.1)"), number) == (0, "closed\n")


def test_a_pause_ends_with_the_signal(service):
    """A service that rests doesn't keep anybody waiting."""
    started = time.monotonic()
    assert ended(service("await pause(stop, 60)"), signal.SIGTERM) == (0, "closed\n")
    assert time.monotonic() - started < 10


def test_work_that_does_not_end_is_cut_off(service):
    """By the deadline, and it says so."""
    status, output = ended(service("await asyncio.sleep(60)"), signal.SIGTERM)
    assert status == 0
    assert "did not finish in time" in output
    assert "closed" not in output


def test_a_failure_ends_the_process_with_a_message(service):
    """Status 1, the error and what to do about it, and no trace of the stack."""
    status, output = ended(service("raise Misconfigured('two plus two')"))
    assert status == 1
    assert "two plus two" in output
    assert "an operator has to act" in output
    assert "Traceback" not in output


def test_a_bug_shows_its_trace(service):
    """What isn't ours is not dressed up."""
    status, output = ended(service("1 / 0"))
    assert status == 1
    assert "ZeroDivisionError" in output
