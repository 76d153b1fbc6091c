"""Following and the process: what streams cost while nothing comes, while nobody reads, and when the process stops."""

import os
import signal
import socket
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from schemaless.ops.datastores import create_shards
from schemaless.stack.local import running_topology
from schemaless.storage.pymysql_driver import SyncStorage
from schemaless.topology import Datastore
from tests.conftest import FLAVOUR, SMALL_REDO_LOGS
from tests.integration.api.api_harness import api_process, row_in
from tests.integration.api.follow_harness import Stream, following, wait_for_followers

BEFORE_THE_POLL_ENDS_S = 25.0
CUT_OFF = "graceful shutdown exceeded"  # what uvicorn logs when requests have not ended within ten seconds
IDLE_QUESTIONS_PER_S_MAX = 100
BURST_MAX_S = 120.0


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """Servers that nobody else asks: other processes of the suite sample all datastores that there are."""
    folder = tmp_path_factory.mktemp("asked")
    with running_topology(folder, minions=0, flavour=FLAVOUR, options=SMALL_REDO_LOGS) as started:
        yield started


@pytest.fixture(scope="module")
def storage(running):
    with SyncStorage(running.topology, timeout_s=60.0) as opened:
        yield opened


@pytest.fixture
def make_datastore(running, storage):
    def make(shards, partitions, placement=("a", "b")):
        datastore = Datastore(f"t{uuid.uuid4().hex[:12]}", shards, partitions, placement)
        return create_shards(storage, datastore, administrators=running.administrators)

    return make


@pytest.fixture
def own(running, make_datastore):
    """A process of the test's own."""
    make_datastore(1, 1, ("a",))  # with the first one come the tables
    with api_process(running.path, heartbeat_s=60) as started:
        yield started


def questions(storage):
    """What all servers were asked so far."""

    def read():
        results = yield "SHOW GLOBAL STATUS LIKE 'Questions'"
        return int(results[0].rows[0][1])

    return sum(master.run(read) for master in storage.masters)


def questions_per_s(storage, below, seconds=0.5):
    """The first rate of a window that is below the bound. If none is, that of the last window.

    The process samples its datastores now and then, which says nothing of followers. These ask in every window.
    """
    deadline = time.monotonic() + BURST_MAX_S
    while True:
        began, before = time.monotonic(), questions(storage)
        time.sleep(seconds)
        rate = (questions(storage) - before) / (time.monotonic() - began)
        if rate < below or time.monotonic() > deadline:
            return rate


@contextmanager
def idle_follower(port, datastore, shard):
    """A plain socket that has seen the beginning of its stream."""
    with socket.create_connection(("127.0.0.1", port), timeout=120) as opened:
        path = f"/v1/{datastore.name}/shards/{shard}/cells?follow=true"
        opened.sendall(f"GET {path} HTTP/1.1\r\nhost: localhost\r\naccept: text/event-stream\r\n\r\n".encode())
        assert opened.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        yield opened


def test_many_idle_followers_ask_no_more_than_one(own, make_datastore, storage):
    """200 streams on 64 shards cost the servers as many queries a second as a single one; and all of them hear."""
    datastore = make_datastore(64, 8)
    with ExitStack() as stack:
        stack.enter_context(idle_follower(own.port, datastore, 0))
        stack.enter_context(idle_follower(own.port, datastore, 1))  # one for each cluster
        few = questions_per_s(storage, IDLE_QUESTIONS_PER_S_MAX)
        readers = [stack.enter_context(idle_follower(own.port, datastore, number % 64)) for number in range(200)]
        wait_for_followers(own, 202)
        many = questions_per_s(storage, IDLE_QUESTIONS_PER_S_MAX)
        assert 0 < few < IDLE_QUESTIONS_PER_S_MAX, "two clusters are asked every 30 ms"
        assert many < IDLE_QUESTIONS_PER_S_MAX, "not for each of 200"
        call = own.at(datastore)
        for shard in range(64):
            call.put(row_in(datastore, shard), 1, {"v": 1})
        for reader in readers:
            while b"event: cell" not in reader.recv(1 << 16):
                pass
    wait_for_followers(own, 0)
    nobody = questions_per_s(storage, few / 2)
    assert nobody < few / 2, "nobody follows, nobody asks"


def rss_mib(process):
    pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def test_readers_that_do_not_read_hold_no_memory(own, make_datastore, storage):
    """Ten readers of a log of 20 MB who take nothing: a small page each is held, and nothing more is read for them.
    Whoever reads on then gets every cell.
    """
    datastore = make_datastore(1, 1, ("a",))
    call = own.at(datastore)
    cells = 20
    for _ in range(cells):
        call.put(uuid.uuid4(), 1, {"x": os.urandom(500_000).hex()})
    limits = httpx.Limits(max_connections=20)
    with (
        httpx.Client(base_url=f"http://127.0.0.1:{own.port}", timeout=20, limits=limits) as client,
        ExitStack() as stack,
    ):
        path = f"{call.prefix}/shards/0/cells?follow=true"
        headers = {"accept": "text/event-stream"}
        before = rss_mib(own.process)
        slow = [stack.enter_context(client.stream("GET", path, headers=headers)) for _ in range(10)]
        time.sleep(1)
        assert rss_mib(own.process) - before < 90, "of 200 MB"
        rate = questions_per_s(storage, IDLE_QUESTIONS_PER_S_MAX)
        assert rate < IDLE_QUESTIONS_PER_S_MAX, "the watch's own and the samplers'"
        assert Stream(slow[0]).added_ids(cells) == list(range(1, cells + 1))
    wait_for_followers(own, 0)


def test_a_stop_ends_streams_at_once_and_in_order(running, make_datastore, capfd):
    """SIGTERM: streams end as answers do, a long poll has its page, a reader that takes nothing is cut off; the process
    ends without waiting for anybody, and so the server needs no deadline.
    """
    datastore = make_datastore(1, 1, ("a",))
    with api_process(running.path) as api, ThreadPoolExecutor(1) as pool:
        call = api.at(datastore)
        for _ in range(12):
            call.put(uuid.uuid4(), 1, {"x": os.urandom(500_000).hex()})
        polling = pool.submit(lambda: call.get("/shards/0/cells?after=end&wait=30"))
        with following(call, after="end") as stream, following(call) as slow:
            stream.next("heartbeat")
            wait_for_followers(api, 3)
            time.sleep(0.5)
            api.process.send_signal(signal.SIGTERM)
            with pytest.raises(StopIteration):
                stream.next()
            page = polling.result(BEFORE_THE_POLL_ENDS_S).json()
            assert (page["cells"], page["next"]["added_id"]) == ([], 12)
            assert api.process.wait(BEFORE_THE_POLL_ENDS_S) in (0, -signal.SIGTERM)
            assert CUT_OFF not in "".join(capfd.readouterr())
            with pytest.raises((httpx.TransportError, StopIteration)):
                slow.added_ids(13)
