"""Responses leave in one write, in order, and none is lost when the connection closes. Readers must take them."""

import asyncio
import json
import signal
import socket
import ssl
from types import SimpleNamespace

import pytest
import uvicorn
from uvicorn.server import ServerState

from api.http import server
from api.http.connection import (
    STALL_TIMEOUT_S,
    STOP_STALL_TIMEOUT_S,
    TAKEN_BYTES_PER_S_MIN,
    CoalescingTransport,
    Connection,
)
from api.http.server import ApiLoop, ApiServer, TlsHandshakes, protocol_within
from tests.certificates import make_certificates


class Recorder(asyncio.Transport):
    """Remembers what reaches the socket."""

    def __init__(self):
        super().__init__()
        self.did = []

    def write(self, data):
        self.did.append(bytes(data))

    def is_closing(self):
        return "closed" in self.did

    def close(self):
        self.did.append("closed")

    def get_extra_info(self, name, default=None):
        return f"the {name}"


async def test_what_is_written_in_one_turn_leaves_together():
    """Head and body of an answer become one write; the next turn's answer is another one."""
    recorder = Recorder()
    transport = CoalescingTransport(recorder, asyncio.get_running_loop())
    transport.write(b"head ")
    transport.write(b"body")
    assert recorder.did == []
    await asyncio.sleep(0)
    transport.write(b"next")
    await asyncio.sleep(0)
    assert recorder.did == [b"head body", b"next"]


async def test_closing_sends_what_was_written_first():
    """An answer with `connection: close` is written and closed in the same turn."""
    recorder = Recorder()
    transport = CoalescingTransport(recorder, asyncio.get_running_loop())
    transport.write(b"goodbye")
    transport.close()
    await asyncio.sleep(0)
    assert recorder.did == [b"goodbye", "closed"]


async def test_everything_else_is_the_real_transports():
    """Addresses, flow control and the like are asked of the socket's own transport."""
    transport = CoalescingTransport(Recorder(), asyncio.get_running_loop())
    assert transport.get_extra_info("peername") == "the peername"


class FakeTransport:
    """What a protocol sees of its connection and of its loop; `left` is what the reader hasn't taken."""

    def __init__(self):
        self.stall_timeout_s = STALL_TIMEOUT_S
        self.left = 100_000
        self.write_paused = True
        self.aborted = False
        self.timers = []

    def get_write_buffer_size(self):
        return self.left

    def abort(self):
        self.aborted = True

    def pause_writing(self):
        self.write_paused = True

    def call_later(self, seconds, work, *arguments):
        assert seconds == self.stall_timeout_s
        self.timers.append(lambda: work(*arguments))

    def time_passes(self):
        due, self.timers = self.timers, []
        for work in due:
            work()


@pytest.fixture
def paused():
    """A connection whose protocol was told to write no more for now."""
    connection = FakeTransport()
    protocol = Connection.__new__(Connection)
    protocol.transport = protocol.flow = protocol.loop = connection
    protocol.cycle = SimpleNamespace(response_complete=False)
    protocol.pause_writing()
    return connection, protocol


def test_a_reader_that_takes_nothing_is_cut_off(paused):
    """After the time-out: it would hold its place and its page for ever (I14)."""
    connection, _ = paused
    connection.time_passes()
    assert connection.aborted


def test_a_reader_that_takes_a_little_now_and_then_is_cut_off(paused):
    """S15: a byte less than the least rate would hold its page for a day."""
    connection, _ = paused
    connection.left -= int(TAKEN_BYTES_PER_S_MIN * STALL_TIMEOUT_S) - 1
    connection.time_passes()
    assert connection.aborted


def test_a_reader_that_is_only_slow_is_not(paused):
    """One that takes a least rate of it, and one that took all of it and was given more."""
    connection, protocol = paused
    for _ in range(2):
        connection.left -= int(TAKEN_BYTES_PER_S_MIN * STALL_TIMEOUT_S)
        connection.time_passes()
    connection.left = 300_000
    protocol.pause_writing()
    first, second = connection.timers
    first()
    assert not connection.aborted
    second()
    assert connection.aborted


def test_a_reader_that_took_all_is_not(paused):
    """The transport resumed meanwhile."""
    connection, _ = paused
    connection.write_paused = False
    connection.time_passes()
    assert not connection.aborted
    assert connection.timers == []


def test_a_stop_cuts_off_a_reader_that_takes_nothing_within_a_second(paused):
    """It would keep the process from ending. One that takes a least rate is waited for."""
    connection, protocol = paused
    connection.timers.clear()
    connection.stall_timeout_s = STOP_STALL_TIMEOUT_S
    protocol.shutdown()
    connection.left -= TAKEN_BYTES_PER_S_MIN
    connection.time_passes()
    assert not connection.aborted
    connection.time_passes()
    assert connection.aborted


class Peer(Recorder):
    """A client's connection. Its protocol is closed with it, as by a loop."""

    protocol = None

    def get_extra_info(self, name, default=None):
        return default

    def close(self):
        if not self.is_closing():
            super().close()
            self.protocol.connection_lost(None)

    def pause_reading(self):
        self.did.append("paused")


@pytest.fixture
async def connect():
    """Connects clients to a process that has room for two. Its app never answers."""

    async def waits(scope, receive, send):
        await asyncio.Event().wait()

    config = uvicorn.Config(waits, http=protocol_within(connections_max=2), log_config=None)
    config.load()
    state = ServerState()
    peers = []

    def connected():
        peer = Peer()
        peers.append(peer)
        peer.protocol = config.http_protocol_class(config=config, server_state=state, app_state={})
        peer.protocol.connection_made(peer)
        return peer

    yield connected
    for peer in peers:
        peer.close()
    for task in state.tasks:
        task.cancel()


async def test_a_full_process_closes_who_was_idle_for_longest(connect):
    """I14: idle connections below the limit of open files keep nobody out."""
    first, second = connect(), connect()
    first.protocol._idle_since += 60.0
    third = connect()
    assert (first.did, second.did, third.did) == ([], ["closed"], [])


async def test_a_full_process_without_an_idle_client_turns_others_away(connect):
    """With a document that says when to come again."""
    busy = [connect() for _ in range(2)]
    for peer in busy:
        peer.protocol.data_received(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
    turned_away = connect()
    answer, closed = turned_away.did
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 1" in head.lower()
    assert json.loads(body)["detail"] == "too many connections"
    assert closed == "closed"
    assert [peer.did for peer in busy] == [[], []]


@pytest.mark.parametrize(("count", "is_refused"), [(99, False), (100, True)])
async def test_headers_are_limited_in_number(connect, count, is_refused):
    """Each costs an object, however short it is (I14). There is a Host besides these."""
    peer = connect()
    peer.protocol.data_received(b"GET / HTTP/1.1\r\nhost: localhost\r\n" + b"a: b\r\n" * count + b"\r\n")
    assert [answer[:12] for answer in peer.did] == ([b"HTTP/1.1 431", "closed"] if is_refused else [])


PIECE = b"a" * (16 << 10)


async def test_a_head_is_limited_in_bytes_before_it_ends(connect):
    """Somebody who never ends one would hold all that was sent (I14)."""
    peer = connect()
    peer.protocol.data_received(b"GET / HTTP/1.1\r\nhost: localhost\r\na: ")
    for _ in range(3):
        peer.protocol.data_received(PIECE)
    assert peer.did == []
    peer.protocol.data_received(PIECE)
    assert [answer[:12] for answer in peer.did] == [b"HTTP/1.1 431", "closed"]


async def test_a_head_that_comes_as_a_whole_is_limited_in_bytes_without_its_payload(connect):
    """One piece of the network may have both."""
    large, with_payload = connect(), connect()
    large.protocol.data_received(b"GET / HTTP/1.1\r\nhost: localhost\r\na: " + PIECE * 5 + b"\r\n\r\n")
    assert [answer[:12] for answer in large.did] == [b"HTTP/1.1 431", "closed"]
    head = b"PUT / HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % (5 * len(PIECE))
    with_payload.protocol.data_received(head + PIECE * 5)
    assert b"HTTP/1.1 431" not in [answer[:12] for answer in with_payload.did]


async def test_a_head_behind_a_request_under_way_is_read_no_further(connect):
    """Until that one has its response: what comes then is no answer to it."""
    peer = connect()
    peer.protocol.data_received(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\nGET / HTTP/1.1\r\na: ")
    for _ in range(3):
        peer.protocol.data_received(PIECE)
    assert peer.did == []
    for _ in range(2):
        peer.protocol.data_received(PIECE)
    assert peer.did[-1] == "paused"


async def test_what_follows_a_refused_payload_belongs_to_no_request(connect):
    """The request that waits before it has its whole payload already."""
    peer = connect()
    head = b"host: localhost\r\n"
    peer.protocol.data_received(b"GET / HTTP/1.1\r\n" + head + b"\r\n")
    peer.protocol.data_received(b"PUT /b HTTP/1.1\r\n" + head + b"content-length: 7\r\n\r\n{'a':1}")
    peer.protocol.data_received(b"PUT /c HTTP/1.1\r\n" + head + b"transfer-encoding: chunked\r\n\r\n5;")
    for _ in range(5):
        peer.protocol.data_received(PIECE)
    peer.protocol.data_received(b"\r\nother\r\n0\r\n\r\n")
    assert [bytes(cycle.body) for cycle in peer.protocol._unanswered()] == [b"{'a':1}", b""]


async def answered_early(peer, length):
    """Sends the head of a request. Its response is there before its payload."""
    peer.protocol.data_received(b"PUT / HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % length)
    peer.protocol.cycle.response_complete = True
    peer.protocol.on_response_complete()


async def test_a_payload_that_nobody_reads_has_a_bound(connect):
    peer = connect()
    await answered_early(peer, 1 << 40)
    for _ in range(16):
        peer.protocol.data_received(bytes(1 << 20))
    assert "closed" not in peer.did
    peer.protocol.data_received(b"x")
    assert peer.did[-1] == "closed"


async def test_a_connection_is_kept_after_a_payload_that_nobody_read(connect):
    peer = connect()
    await answered_early(peer, 10)
    peer.protocol.data_received(b"12345")
    peer.protocol.data_received(b"67890")
    assert peer.protocol._head_deadline is None
    assert peer.protocol.timeout_keep_alive_task is not None
    peer.protocol.data_received(b"GET / HT")
    assert peer.protocol._head_deadline is not None
    assert peer.protocol.timeout_keep_alive_task is None


@pytest.mark.parametrize("host", [b"[::1]:8000", b"[::1]", b"localhost:1"])
async def test_the_authority_of_an_absolute_target_is_the_host(connect, host):
    peer = connect()
    peer.protocol.data_received(b"GET http://" + host + b"/x HTTP/1.1\r\nhost: other\r\n\r\n")
    assert dict(peer.protocol.scope["headers"])[b"host"] == host


class Watched:
    """A watchdog that notes what it is told."""

    def __init__(self):
        self.limits_s = []

    def start(self):
        self.limits_s.append(None)

    def end_within(self, limit_s):
        self.limits_s.append(limit_s)


async def test_a_server_is_watched_from_its_start(monkeypatch):
    """Nobody else would end one whose event loop hangs."""
    seen = []

    async def serve(server, sockets):
        seen.extend(watchdog.limits_s)

    monkeypatch.setattr(uvicorn.Server, "serve", serve)
    watchdog = Watched()
    config = uvicorn.Config(None, http=protocol_within(connections_max=2), log_config=None)
    await ApiServer(config, drain_s=5.0, watchdog=watchdog, before_drain=list, before_shutdown=list).serve()
    assert seen == [None]


@pytest.mark.parametrize("forces", [False, True])
async def test_the_signal_that_ends_the_drain_cuts_off_no_request(monkeypatch, forces):
    """Only a further one does."""
    seen = []

    async def shutdown(server, sockets):
        seen.append(server.force_exit)

    monkeypatch.setattr(uvicorn.Server, "shutdown", shutdown)
    config = uvicorn.Config(
        None, http=protocol_within(connections_max=2), log_config=None, timeout_graceful_shutdown=10
    )
    config.load()
    again = (lambda: stopping.handle_exit(signal.SIGINT, None)) if forces else (lambda: None)
    watchdog = Watched()
    stopping = ApiServer(config, drain_s=5.0, watchdog=watchdog, before_drain=lambda: None, before_shutdown=again)
    stopping.handle_exit(signal.SIGTERM, None)
    stopping.handle_exit(signal.SIGINT, None)
    await stopping.shutdown()
    assert seen == [forces]
    assert watchdog.limits_s == [25.0]  # the drain, the requests in flight, and twice the time to close


@pytest.fixture
def tls_server(tmp_path):
    """Runs a test beside a server with room for twenty connections, two of them handshakes. Its app has no content."""
    files = make_certificates(tmp_path)

    async def answers(scope, receive, send):
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def with_server(test):
        config = uvicorn.Config(
            answers,
            http=protocol_within(connections_max=20, tls=True),
            ssl_certfile=files.certificate,
            ssl_keyfile=files.key,
            log_config=None,
        )
        config.load()
        state = ServerState()

        def protocol():
            return config.http_protocol_class(config=config, server_state=state, app_state={})

        trusting = ssl.create_default_context(cafile=files.tls.ca)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listening = await asyncio.get_running_loop().create_server(protocol, sock=listener, ssl=config.ssl)

            async def connect(tls=trusting):
                return await asyncio.open_connection(*listener.getsockname(), ssl=tls)

            try:
                await test(connect, state)
            finally:
                listening.close()

    def run(test):
        with asyncio.Runner(loop_factory=ApiLoop) as runner:
            runner.run(with_server(test))

    return run


def test_a_tls_handshake_has_a_deadline(monkeypatch, tls_server):
    """A client that never says a word holds a file (I14)."""
    monkeypatch.setattr(server, "HANDSHAKE_TIMEOUT_S", 0.1)

    async def silent(connect, state):
        reader, writer = await connect(None)
        assert await reader.read() == b""
        writer.close()

    tls_server(silent)


def test_handshakes_are_bounded_and_keep_no_honest_client_out(monkeypatch, tls_server):
    """A new one takes the place of the longest under way: each holds a file of the process (I14)."""
    monkeypatch.setattr(server, "HANDSHAKE_TIMEOUT_S", 600.0)

    async def silent_beside_honest(connect, state):
        silent = [await connect(None) for _ in range(4)]
        assert [await reader.read() for reader, _ in silent[:2]] == [b"", b""]
        answer, honest = await connect()
        honest.write(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert await answer.readline() == b"HTTP/1.1 204 No Content\r\n"
        assert await silent[2][0].read() == b""
        assert not silent[3][0].at_eof()
        for writer in (honest, *(writer for _, writer in silent)):
            writer.close()

    tls_server(silent_beside_honest)


def test_a_client_that_speaks_no_tls_holds_nothing(tls_server):
    """Its handshake fails, and its protocol never had a connection."""
    met = []

    async def plain(connect, state):
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: met.append(context))
        reader, writer = await connect(None)
        writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await reader.read()
        writer.close()
        assert state.connections == set()

    tls_server(plain)
    assert met == []


async def test_where_clients_have_all_places_no_handshake_begins():
    """Those that are on their way out have them, too, until they are gone (I14)."""
    aborted = []
    protocol = SimpleNamespace(connections_max=9, handshakes_max=1, connections=set(range(10)))
    transport = SimpleNamespace(abort=lambda: aborted.append(True))
    TlsHandshakes(asyncio.get_running_loop(), lambda: protocol, None).connection_made(transport)
    assert aborted == [True]


async def test_who_makes_room_counts_until_it_is_gone(connect):
    """One that doesn't answer the end of its TLS still has its file. It makes room for one, not for all who come."""
    first, second = connect(), connect()
    for peer in (first, second):
        peer.close = lambda did=peer.did: did.append("closed")
    third, fourth = connect(), connect()
    assert [peer.did for peer in (first, second, third, fourth)] == [["closed"], ["closed"], [], []]
    assert len(first.protocol.connections) == 4
