"""DynamoDB Local and boto3, the peer of the clients: what they need is fetched to the cache folder at the first run.

DynamoDB Local listens on all interfaces, and can't be told otherwise. So it runs in a network namespace that has only
loopback, and boto3's process enters it. Boto3 has a virtual environment of its own, because it needs an older
python-dateutil than ours.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.client_load import ClientOutcome, run_process
from bench.trips import Trip
from schemaless.stack.local import LocalServer
from schemaless.stack.programs import cache_folder, find_program

FOLDER = "dynamodb-local-2.6.1"
BOTO3 = "boto3-1.44.3"
LOAD = Path(__file__).parent / "boto3_load.py"
POM = Path(__file__).parent / "dynamodb" / "pom.xml"
PORT = 8000  # of its own namespace, so nobody else has it
URL = f"http://127.0.0.1:{PORT}"
MAIN = "com.amazonaws.services.dynamodbv2.local.main.ServerRunner"
READY_TIMEOUT_S = 60.0
FETCH_TIMEOUT_S = 600.0


class CannotRun(Exception):
    """Says why there is no DynamoDB Local here."""


@dataclass(frozen=True, slots=True)
class DynamoDB:
    """`enter` are the words that enter its namespace, before a command. `python` has boto3."""

    enter: Sequence[str]
    python: Path

    def put(self, warm_up: Sequence[Trip], trips: Sequence[Trip], at_a_time: int) -> ClientOutcome:
        """Puts trips through boto3, in a process of its own."""
        given, measured = ([[str(trip.row_key), trip.json.decode()] for trip in some] for some in (warm_up, trips))
        plan = {"host": URL, "at_a_time": at_a_time, "warm_up": given, "puts": measured}
        return run_process([*self.enter, str(self.python), str(LOAD)], json.dumps(plan).encode())


@contextmanager
def dynamodb_local(folder: Path) -> Iterator[DynamoDB]:
    """Runs it in memory. Raises CannotRun."""
    jars, python = _jars(), _boto3_python()
    java = [find_program("java"), "-Xmx1g", f"-Djava.library.path={jars}", "-cp", f"{jars}/*", MAIN, "-inMemory"]
    loopback = 'ip link set lo up && cd "$0" && exec "$@"'  # it writes a file to where it starts
    argv = ["unshare", "--map-root-user", "--net", "sh", "-c", loopback, str(folder), *java, "-port", str(PORT)]
    process = LocalServer("dynamodb", argv, folder / "dynamodb.log", lambda me: None)
    process.start()
    try:
        enter = ["nsenter", "--preserve-credentials", "--target", str(process.pid), "--user", "--net"]
        _wait_ready(process, enter)
        yield DynamoDB(enter, python)
    finally:
        process.terminate()


def _jars() -> Path:
    folder = cache_folder() / FOLDER
    if not folder.is_dir():
        fresh = folder.with_name(f".{FOLDER}.{time.time_ns()}")
        argv = ["mvn", "-q", "-B", "-f", str(POM), "dependency:copy-dependencies", f"-DoutputDirectory={fresh}"]
        try:
            subprocess.run([*argv, "-DincludeScope=runtime"], check=True, timeout=FETCH_TIMEOUT_S, capture_output=True)
        except (OSError, subprocess.SubprocessError) as error:
            shutil.rmtree(fresh, ignore_errors=True)
            raise CannotRun(f"Maven can't fetch DynamoDB Local: {error}") from error
        fresh.rename(folder)
    return folder


def _boto3_python() -> Path:
    folder = cache_folder() / BOTO3
    python = folder / "bin" / "python"
    if not folder.is_dir():
        fresh = folder.with_name(f".{BOTO3}.{time.time_ns()}")
        try:
            subprocess.run([sys.executable, "-m", "venv", fresh], check=True, timeout=60, capture_output=True)
            install = [fresh / "bin" / "python", "-m", "pip", "install", "-q", BOTO3.replace("-", "==")]
            subprocess.run(install, check=True, timeout=FETCH_TIMEOUT_S, capture_output=True)
        except (OSError, subprocess.SubprocessError) as error:
            shutil.rmtree(fresh, ignore_errors=True)
            raise CannotRun(f"pip can't fetch boto3: {error}") from error
        fresh.rename(folder)  # its interpreter finds its packages from where it is
    return python


def _wait_ready(process: LocalServer, enter: Sequence[str]) -> None:
    """Raises CannotRun."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    knock = f"import socket; socket.create_connection(('127.0.0.1', {PORT}), 2).close()"
    while subprocess.run([*enter, "python3", "-c", knock], capture_output=True, check=False).returncode:
        if time.monotonic() > deadline or not process.alive():
            raise CannotRun(f"DynamoDB Local does not answer; its log: {process.log}")
        time.sleep(0.2)
