"""Servers for the tests: real ones, started once a session. A parallel run starts them once for each of its workers.

SCHEMALESS_TEST_BACKEND=auto|docker|local chooses between containers and plain processes; auto takes containers when
an engine answers and already has the images (containers.py; MariaDB runs as plain processes always).
SCHEMALESS_MYSQL_FLAVOUR=mariadb|mysql chooses the kind of server.
SCHEMALESS_TEST_SEED sets the seed of the tests' randomness (seed.py), which is printed at the end of each run.
What is missing fails the tests that need it; nothing is skipped.
"""

import contextlib
import os
import random
import re
import signal
import sys
import uuid
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import anyio._backends._asyncio  # noqa: F401  # its first import beside 600 tasks met a fault of CPython 3.11.7
import hypothesis.core
import pytest
import structlog
from hypothesis import settings

from schemaless.ops.datastores import create_shards
from schemaless.stack.local import RunningTopology, running_broker, running_topology
from schemaless.stack.programs import Flavour
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.pymysql_driver import SyncStorage
from schemaless.topology import Datastore, Topology
from tests.seed import SEED, seeded

FLAVOUR = Flavour(os.environ.get("SCHEMALESS_MYSQL_FLAVOUR", "mariadb"))
# Each worker has servers of its own, and a disk holds them all. A server ignores the line of the other kind.
SMALL_REDO_LOGS = "loose-innodb-log-file-size=64M\nloose-innodb-redo-log-capacity=64M\n"
if FLAVOUR is Flavour.MYSQL:
    # Each server takes some 2,600 of the 65,536 asynchronous requests that a kernel allows by default, and one that
    # gets none doesn't start. Three workers have more than 25 servers now and then.
    SMALL_REDO_LOGS += "innodb-use-native-aio=OFF\n"

# A wall clock would fail a slow machine: `timeout` bounds each test as a whole.
settings.register_profile("schemaless", deadline=None, print_blob=True)
settings.load_profile("schemaless")

LONGEST = (
    "tests/acceptance/",
    "/ui/",
    "/stack/",
    "tests/faults/",
    "/controller/",
    "/moves/",
    "/ops/",
    "tests/integration/",
)

MakeDatastore = Callable[..., Datastore]
internal_errors: list[str] = []


def pytest_configure(config: pytest.Config) -> None:
    os.environ["SCHEMALESS_USUAL_PORTS"] = "false"  # they are for people: two stacks of tests would both want them
    # Brokers of tests live for minutes. Java's second compiler would take more than a third of their processor time.
    os.environ.setdefault("JAVA_TOOL_OPTIONS", "-XX:TieredStopAtLevel=1")
    os.environ["PYTHONFAULTHANDLER"] = "1"  # a process that ends by a signal's fault says where
    # Or each of over a thousand processes would compile all it imports: a fifth of the time that a command takes.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    # structlog's own tracebacks show all locals in colours: four fifths of the time of tests that let processes die.
    plain = structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)
    structlog.configure([*structlog.get_config()["processors"][:-1], plain])
    if config.getoption("--hypothesis-seed", None) is None:
        hypothesis.core.global_force_seed = SEED  # what --hypothesis-seed sets
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell's `&` does that, processes inherit it, and the commands that tests interrupt would run for ever.
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take minutes come first. Else a parallel run would end with one worker that is still at them."""
    items.sort(key=lambda item: next((n for n, folder in enumerate(LONGEST) if folder in item.nodeid), len(LONGEST)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"SCHEMALESS_TEST_SEED={SEED}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Shows what is gone when somebody reads an error: the end of the log that it names, and which processes ran, or
    had ended.
    """
    report = yield
    if not report.failed:
        return report
    for log in set(re.findall(r"log: (/\S+)", report.longreprtext)):
        if Path(log).is_file():
            lines = Path(log).read_text(errors="replace").splitlines()[-30:]
            report.sections.append((f"The end of {log}", "\n".join(lines)))
    report.sections.append(("Processes", "\n".join(children())))
    return report


def children() -> Iterator[str]:
    """The processes that a worker has started: state (Z: it has ended), ticks of processor time, command."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, parent, *fields = (folder / "stat").read_text().rpartition(") ")[2].split()
            if int(parent) == os.getpid():
                command = (folder / "cmdline").read_text().replace("\0", " ")
                yield f"{folder.name} {state} {int(fields[9]) + int(fields[10])} {command[:150]}"


def pytest_internalerror(excrepr: object) -> None:
    """An error inside a worker's pytest ends the run with another one, which says nothing. So the first is kept."""
    internal_errors.append(str(excrepr))


def pytest_unconfigure() -> None:
    if internal_errors:
        print("the first internal error:", *internal_errors[0].splitlines()[-30:], sep="\n", file=sys.stderr)


@pytest.fixture
def chance(request: pytest.FixtureRequest) -> random.Random:
    """The randomness of one test."""
    return seeded(request.node.nodeid)


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningTopology]:
    """Clusters a and b, one minion each, with handles of their processes. A test that harms one heals it."""
    from tests import containers  # costs half a second, which runs without servers don't pay

    folder = tmp_path_factory.mktemp("mysql")
    if containers.mysql_in_containers(FLAVOUR):
        servers = containers.containers_topology(folder)
    else:
        servers = running_topology(folder, flavour=FLAVOUR, options=SMALL_REDO_LOGS)
    with servers as started:
        yield started


@pytest.fixture(scope="session")
def topology(running: RunningTopology) -> Topology:
    return running.topology


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Bootstrap address of a broker."""
    from tests import containers

    folder = tmp_path_factory.mktemp("kafka")
    with containers.container_broker() if containers.kafka_in_container() else running_broker(folder) as bootstrap:
        yield bootstrap


@pytest.fixture(scope="session")
def storage(topology: Topology) -> Iterator[SyncStorage]:
    with SyncStorage(topology, timeout_s=60.0) as opened:
        yield opened


@pytest.fixture(scope="session")
def admin(running: RunningTopology) -> Iterator[SyncStorage]:
    """The servers with the administrators' account, for what no service may do to them."""
    with SyncStorage(running.administrators, timeout_s=60.0) as opened:
        yield opened


@pytest.fixture
async def async_storage(topology: Topology):
    async with AsyncStorage(topology, connect_timeout_s=30.0, timeout_s=60.0) as opened:
        yield opened


@pytest.fixture(scope="session")
def make_datastore(running: RunningTopology, storage: SyncStorage) -> MakeDatastore:
    """Makes a fresh datastore of its own name on the masters, ready, without topics.

    make_datastore(shards=4, partitions=2, placement=("a", "b")) -> Datastore
    """

    def make(shards: int = 4, partitions: int = 2, placement: tuple[str, ...] = ("a", "b")) -> Datastore:
        datastore = Datastore(f"t{uuid.uuid4().hex[:12]}", shards, partitions, placement)
        return create_shards(storage, datastore, administrators=running.administrators)

    return make
