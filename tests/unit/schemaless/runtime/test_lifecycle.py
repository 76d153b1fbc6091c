"""A service's end: in order on a signal, cut off when it doesn't finish, with a message when it fails."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.waiting import until

PROGRAM = """
import asyncio, sys, time
from schemaless.config import ConsumerSettings
from schemaless.errors import Misconfigured
from schemaless.runtime.lifecycle import cancelled_at, pause, run_service

async def serve(parts):
    stop = parts.stop
    print("ready", flush=True)
    {work}
    print("closed", flush=True)

from schemaless.runtime import lifecycle, watchdog
lifecycle.CLOSE_TIMEOUT_S = {close_timeout_s}
watchdog.IDLE_LIMITS = {idle_limits}

class TestSettings(ConsumerSettings):
    hang_limit_s: float = {hang_limit_s}

run_service("test", TestSettings, serve, finish_timeout_s=0.5)
"""
LINES = 3000
NO_SERVERS = '{"version": 2, "clusters": {}}'


def environment_of(topology: Path, log_level: str) -> dict[str, str]:
    settings = {"TOPOLOGY": str(topology), "KAFKA": "none", "LOG_LEVEL": log_level}
    return os.environ | {f"SCHEMALESS_{name}": value for name, value in settings.items()}


@pytest.fixture
def service(tmp_path):
    """Starts a service with a body of its own; killed at the end."""
    started = []
    topology = tmp_path / "topology.json"
    topology.write_text(NO_SERVERS)

    def start(
        work: str, *, hang_limit_s: float = 60.0, idle_limits: int = 10, close_timeout_s: float = 5.0
    ) -> subprocess.Popen:
        program = PROGRAM.format(
            work=textwrap.indent(work, "    ").strip(),
            hang_limit_s=hang_limit_s,
            idle_limits=idle_limits,
            close_timeout_s=close_timeout_s,
        )
        command = [sys.executable, "-c", program]
        environment = environment_of(topology, "warning")
        started.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
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
    """What is in flight is finished, then everything is closed, status 0."""
    assert ended(service("await stop.wait()\nawait asyncio.sleep(0.1)"), number) == (0, "closed\n")


def test_a_pause_ends_with_the_signal(service):
    """A service that rests for an hour doesn't keep anybody waiting: it closes before it would be cut off."""
    assert ended(service("await pause(stop, 3600)"), signal.SIGTERM) == (0, "closed\n")


def test_work_without_an_end_is_cancelled_at_the_stop(service):
    """What consumers do: nothing has to be finished, because checkpoints moved with the effects (I10)."""
    work = "async def follow():\n    await asyncio.sleep(3600)\nawait cancelled_at(stop, follow())"
    assert ended(service(work), signal.SIGTERM) == (0, "closed\n")


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
    assert "correct what the message names" in output
    assert "Traceback" not in output


def test_a_failure_within_a_group_of_tasks_is_one_line(service):
    """Services run tasks in groups; the error that ends them is ours all the same."""
    work = "raise ExceptionGroup('tasks', [ExceptionGroup('inner', [Misconfigured('two plus two')])])"
    status, output = ended(service(work))
    assert status == 1
    assert "two plus two" in output
    assert "Traceback" not in output


@pytest.mark.parametrize("work", ["1 / 0", "raise ExceptionGroup('', [Misconfigured('ours'), ZeroDivisionError()])"])
def test_a_bug_shows_its_trace(service, work):
    """What isn't ours is not dressed up."""
    status, output = ended(service(work))
    assert status == 1
    assert "Traceback" in output
    assert "ZeroDivisionError" in output


def test_a_task_that_exits_ends_the_process_at_once(service):
    """As a user's code may do. A thread that still runs holds up nothing."""
    work = """
import threading, time
threading.Thread(target=time.sleep, args=[60]).start()
await asyncio.gather(asyncio.to_thread(int), asyncio.create_task(exits()))
"""
    status, output = ended(service("async def exits():\n    sys.exit(0)\n" + work))
    assert status == 1
    assert "SystemExit: 0" in output


def test_a_loop_that_hangs_ends_its_process(service):
    """Kafka's heartbeats have a thread of their own, so nobody else would find out."""
    status, output = ended(service("time.sleep(3600)", hang_limit_s=1.0))
    assert status == 70
    assert "the event loop hangs" in output


HOLDS = "import ctypes\nctypes.PyDLL(None).sleep(3600)"


@pytest.mark.parametrize(
    ("work", "limits", "number", "status"),
    [
        ("sum(range(10**15))", {"hang_limit_s": 2.0}, None, -signal.SIGPROF),
        (HOLDS, {"hang_limit_s": 6.0, "idle_limits": 1}, None, 1),
        ("await stop.wait()\nsum(range(10**15))", {"close_timeout_s": 0.1}, signal.SIGTERM, -signal.SIGPROF),
    ],
)
def test_who_holds_the_interpreter_is_ended_without_it(service, work, limits, number, status):
    """No thread of Python's would run again: a regular expression or a sum in C has no end. So it is at the stop."""
    found, output = ended(service(work, **limits), number)
    assert found == status
    assert "in serve" in output


def test_a_process_that_was_halted_as_a_whole_goes_on(service):
    """For longer than its limit."""
    process = service("print('halts', flush=True)\nawait stop.wait()", hang_limit_s=1.5)
    for line in ("ready\n", "halts\n"):
        assert process.stdout.readline() == line
    process.send_signal(signal.SIGSTOP)
    time.sleep(3)
    process.send_signal(signal.SIGCONT)
    time.sleep(0.5)
    process.terminate()
    assert process.wait(60) == 0


def test_an_end_that_hangs_is_cut_off_and_says_where(service):
    """Also one that holds the event loop, so that no timeout of it can end anything."""
    status, output = ended(service("await stop.wait()\ntime.sleep(3600)", close_timeout_s=0.1), signal.SIGTERM)
    assert status == 70
    assert "did not end by itself" in output
    assert "in serve" in output


@pytest.fixture
def unread(service, tmp_path):
    """Starts a service that writes more than a pipe takes and than is queued, while nobody reads, and then goes on."""
    through = tmp_path / "through"
    loud = f"""
import pathlib, structlog
for n in range({LINES}):
    await asyncio.sleep(0)
    print("x" * 1000)
    structlog.get_logger().warning("a line", n=n, each=True)
pathlib.Path({str(through)!r}).touch()
"""

    def start(then: str, hang_limit_s: float = 60.0) -> subprocess.Popen:
        process = service(loud + then, hang_limit_s=hang_limit_s)
        until(lambda: through.exists() or process.poll() is not None)
        return process

    return start


@pytest.mark.parametrize(
    ("then", "hang_limit_s", "status"), [("await stop.wait()", 60.0, 0), ("time.sleep(3600)", 3.0, 70)]
)
def test_nobody_waits_for_who_reads_its_lines(unread, then, hang_limit_s, status):
    """Neither who prints or logs, nor the stop, nor the watchdog, who first says what it does."""
    process = unread(then, hang_limit_s)
    process.terminate()
    assert process.wait(60) == status


def test_lines_that_nobody_reads_in_time_are_dropped_and_counted(unread):
    """What is left is whole and in order, and says how many are gone."""
    process = unread("from schemaless.runtime import outputs\noutputs._SETTLED_WITHIN_S = 60\nawait stop.wait()")
    process.terminate()
    _, *lines = process.stdout.readlines()
    said = [line for line in lines if "were dropped" in line]
    written = [line for line in lines if line not in (*said, "closed\n")]
    numbers = [int(found) for line in written for found in re.findall(r" n=(\d+)", line)]
    assert numbers == sorted(numbers)
    assert all(line == "x" * 1000 + "\n" or " n=" in line for line in written)
    dropped = sum(int(re.search(r"lines=(\d+)", line)[1]) for line in said)
    assert dropped > 0
    assert len(written) + dropped == 2 * LINES


@pytest.mark.parametrize("name", ["tailer", "cleaner", "indexer"])
def test_every_service_honours_its_log_level(tmp_path, name):
    """An error that ends the process is one line with a hint, which `critical` leaves out."""

    def ran(level: str) -> tuple[int, str]:
        environment = environment_of(tmp_path / "missing.json", level)
        done = subprocess.run(
            [sys.executable, "-m", name], env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        return done.returncode, done.stdout + done.stderr

    status, output = ran("info")
    assert status == 1
    assert "missing.json" in output
    assert "correct what the message names" in output
    assert "Traceback" not in output
    assert ran("critical") == (1, "")
