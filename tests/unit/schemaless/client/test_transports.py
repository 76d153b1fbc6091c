"""Both clients over the connections that they really make, against a small HTTP server on a port of this machine."""

import asyncio
import contextlib
import socket
import ssl
import subprocess
import sys
import threading
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import pytest
import trustme

from schemaless import AsyncClient, Client, Limits
from schemaless.client.exchange import ClientRequest
from schemaless.errors import Invalid, Misconfigured, Unavailable
from schemaless.stack.plan import free_ports

ROW = "5b1d5b2e-8d5a-4a3e-9a53-4f0f6a3f2a11"
PUT = {"row_key": ROW, "column_name": "A", "ref_key": 1, "status": "stored", "shard": 0, "copies": 2}
ONCE = Limits(attempts_max=1)
EMPTY = {}
FORKED = """
import os, sys
from schemaless import Client
client = Client([sys.argv[1]], datastore="m")
client.put_cell(sys.argv[2], "A", 1, {})
child = os.fork()
client.put_cell(sys.argv[2], "A", 2, {})
if child:
    sys.exit(os.waitpid(child, 0)[1])
os._exit(0)
"""
TWO_LOOPS = """
import asyncio, gc, logging, sys
from schemaless import AsyncClient
logging.basicConfig()
client = AsyncClient([sys.argv[1]], datastore="m")
first = asyncio.run(client.put_cell(sys.argv[2], "A", 1, {}))
second = asyncio.run(client.put_cell(sys.argv[2], "A", 1, {}))
print(first.status, second.status)
del client
gc.collect()
"""


class Server(ThreadingHTTPServer):
    """Answers every request with a stored put, unless a test has a `plan` for it. Notes targets and headers."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.targets = []
        self.headers = []
        self.connections = self.at_once = self.most_at_once = 0
        self.plan = []
        self.reads_after_s = 0.0
        self.reads_slowly = False
        self.never = threading.Event()
        self.together = threading.Barrier(1)
        self.lock = threading.Lock()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, *_):
        """Connections that clients close are part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self):
        super().setup()
        self.server.connections += 1

    def log_message(self, *_):
        pass

    def answer(self):
        server = self.server
        if server.reads_after_s:
            server.never.wait(server.reads_after_s)
        length = int(self.headers.get("content-length", 0))
        while server.reads_slowly and length:
            length -= len(self.rfile.read(min(length, 1 << 16)))
            server.never.wait(0.02)
        self.rfile.read(length)
        with server.lock:
            server.targets.append(self.path)
            server.headers.append({name.lower(): value for name, value in self.headers.items()})
            server.at_once += 1
            server.most_at_once = max(server.most_at_once, server.at_once)
            planned = server.plan.pop(0) if server.plan else None
        with contextlib.suppress(threading.BrokenBarrierError):
            server.together.wait()
        with server.lock:
            server.at_once -= 1
        content, headers = msgspec.json.encode(PUT), {"content-type": "application/json"}
        if planned == "drop":  # closes without a word
            self.close_connection = True
            return
        if planned == "no gzip":
            headers["content-encoding"] = "gzip"
        if planned == "deflate":
            content, headers["content-encoding"] = zlib.compress(content), "deflate"
        if planned == "trickle":  # the whole answer would take 20 s
            content += b" " * 1000
            self.wfile = _Trickle(self.wfile, server.never)
        if planned == "last":  # closes after its answer, as a server does whose idle time is over
            self.close_connection = True
        self.send_response(302 if planned == "elsewhere" else 201)
        for name, value in {**headers, "content-length": str(len(content)), "location": "/elsewhere"}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_PUT = do_POST = answer


class _Trickle:
    """Writes a byte, and another one a moment later."""

    def __init__(self, file, never):
        self._file = file
        self._never = never

    def write(self, data):
        for byte in data:
            self._file.write(bytes([byte]))
            self._never.wait(0.02)

    def __getattr__(self, name):
        return getattr(self._file, name)


@pytest.fixture
def server():
    with Server() as started:
        thread = threading.Thread(target=started.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield started
        started.together.abort()
        started.shutdown()
        thread.join()


def encrypt(server, ca):
    """Lets the server speak TLS, and writes the CA of its certificate. Returns its URL."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(ca)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    return server.url.replace("http:", "https:")


def sync_puts(hosts, count, at_a_time=1, limits=None, body=EMPTY):
    """Returns what each put gave or raised, and the failures that hosts had in a row."""

    def put(client, number):
        try:
            return client.put_cell(ROW, "A", number, body)
        except Exception as error:
            return error

    with Client(hosts, datastore="m", limits=limits) as client, ThreadPoolExecutor(at_a_time) as threads:
        found = list(threads.map(lambda number: put(client, number), range(count)))
        return found, [host.failures for host in client._hosts._hosts.values()]


def async_puts(hosts, count, at_a_time=1, limits=None, body=EMPTY):
    async def put_all():
        async with AsyncClient(hosts, datastore="m", limits=limits) as client:
            found, left = [], list(range(count))
            while left:
                some, left = left[:at_a_time], left[at_a_time:]
                tasks = (client.put_cell(ROW, "A", number, body) for number in some)
                found += await asyncio.gather(*tasks, return_exceptions=True)
            return found, [host.failures for host in client._hosts._hosts.values()]

    return asyncio.run(put_all())


both = pytest.mark.parametrize("puts", [sync_puts, async_puts])


@both
def test_requests_share_one_connection(server, puts):
    found, _ = puts([server.url], 5)
    assert [put.status for put in found] == ["stored"] * 5
    assert server.connections == 1
    assert Counter(headers["content-type"] for headers in server.headers) == {"application/msgpack": 5}


@both
def test_a_connection_that_the_server_closed_costs_no_put(server, puts):
    """An idle time is over, or a process restarts: the next request takes another connection."""
    server.plan = ["last", None, "last"]
    found, _ = puts([server.url], 4, limits=Limits(attempts_max=2, pause_s=0.001))
    assert [getattr(put, "status", put) for put in found] == ["stored"] * 4


@both
@pytest.mark.parametrize("broken", ["drop", "no gzip"])
def test_an_answer_that_breaks_off_or_can_not_be_decompressed_is_one_that_never_came(server, puts, broken):
    """I15: the next attempt counts, and the caller sees no error of the HTTP library."""
    server.plan = [broken]
    (put,), _ = puts([server.url], 1, limits=Limits(attempts_max=3, pause_s=0.001))
    assert put.status == "stored"
    server.plan = [broken] * 3
    (error,), _ = puts([server.url], 1, limits=ONCE)
    assert type(error) is Unavailable


@both
def test_a_compressed_answer_is_read(server, puts):
    server.plan = ["deflate"]
    (put,), _ = puts([server.url], 1, limits=ONCE)
    assert put.status == "stored"


@both
def test_a_large_body_has_the_time_of_an_attempt_not_that_of_connecting(server, puts):
    """Otherwise a batch of 15 MiB over a network that takes longer than that could never be sent."""
    server.reads_after_s = 0.2
    limits = Limits(attempts_max=1, connect_timeout_s=0.1)
    found, _ = puts([server.url], 2, limits=limits, body={"text": "x" * (14 << 20)})
    assert [getattr(put, "status", put) for put in found] == ["stored"] * 2
    assert server.connections == 1  # the second one went where the first had gone
    assert server.headers[0]["content-type"] == "application/msgpack"
    assert int(server.headers[0]["content-length"]) > 14 << 20


def test_a_child_of_fork_has_connections_of_its_own(server):
    """Both would write into one connection, and read each other's answers."""
    subprocess.run([sys.executable, "-c", FORKED, server.url, ROW], check=True, timeout=120)
    assert len(server.targets) == 3
    assert server.connections == 2


async def test_what_is_in_flight_when_an_async_client_is_closed_ends_in_an_error_of_ours(server):
    client = AsyncClient([server.url], datastore="m")
    async with client._transport.place():
        await client.close()
        with pytest.raises(Unavailable, match="closed"):
            await client._transport.send(ClientRequest("GET", "/"), server.url, 1)


@both
def test_nobody_is_sent_elsewhere(server, puts):
    """A redirect isn't followed: a token would go to whoever is named there."""
    server.plan = ["elsewhere"]
    (error,), _ = puts([server.url], 1, limits=ONCE)
    assert isinstance(error, Unavailable)
    assert len(server.targets) == 1


@both
def test_more_requests_than_places_wait_and_say_nothing_against_the_host(server, puts):
    """I14: so many requests are in flight, and no more. A wait for a place of our own is no failure of a host."""
    server.together = threading.Barrier(4)  # each answer waits for three others
    found, failures = puts([server.url], 40, 40, Limits(connections_max=4, attempts_max=1))
    assert [getattr(put, "status", put) for put in found] == ["stored"] * 40
    assert failures == [0]
    assert (server.most_at_once, server.connections) == (4, 4)


@both
def test_who_does_not_answer_is_named_with_the_time(server, puts):
    server.together = threading.Barrier(2)  # for which nobody comes
    (error,), failures = puts([server.url], 1, limits=Limits(attempts_max=1, attempt_timeout_s=0.05))
    assert str(error) == f"no answer from {server.url} (no whole answer within 0.05 s), the last of 1 attempt"
    assert failures == [1]


@both
def test_an_answer_that_comes_byte_by_byte_ends_with_its_attempt(server, puts):
    """I14. A time-out of the socket begins again with every byte, so it bounds nothing."""
    server.plan = ["trickle"]
    (put,), _ = puts([server.url], 1, limits=Limits(attempt_timeout_s=0.3, pause_s=0.001))
    assert put.status == "stored"
    assert server.connections > 1  # the next attempt didn't wait for it


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "tls"])
def test_a_body_that_is_taken_piece_by_piece_ends_with_its_attempt(server, encrypted, tmp_path, monkeypatch):
    """I14: the whole body would take four seconds."""
    server.reads_slowly = True
    url = server.url
    if encrypted:
        url = encrypt(server, tmp_path / "ca.pem")
        monkeypatch.setenv("SCHEMALESS_CA", str(tmp_path / "ca.pem"))
    limits = Limits(attempts_max=1, attempt_timeout_s=0.5)
    (error,), _ = sync_puts([url], 1, limits=limits, body={"text": "x" * (14 << 20)})
    assert str(error) == f"no answer from {url} (no whole answer within 0.5 s), the last of 1 attempt"


@both
def test_who_refuses_a_connection_is_named_with_the_reason(puts):
    (port,) = free_ports(1)
    (error,), _ = puts([f"http://127.0.0.1:{port}"], 1, limits=ONCE)
    assert f"no answer from http://127.0.0.1:{port} (" in str(error)
    assert "Connection refused" in str(error) or "Connect call failed" in str(error)
    assert "object at 0x" not in str(error)


@both
def test_a_name_server_that_is_away_holds_nobody_longer_than_a_connection_may_take(puts, monkeypatch):
    """I14: the C library's look-up can't be interrupted. All that wait share it, so no thread is added."""
    asked, answers = [], threading.Event()
    looked_up = socket.getaddrinfo

    def getaddrinfo(host, *args, **options):
        if host != "api.example":
            return looked_up(host, *args, **options)
        asked.append(host)
        answers.wait()
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    limits = Limits(attempts_max=3, connect_timeout_s=0.05, pause_s=0.001)
    try:
        found, _ = puts(["http://api.example:8000"], 4, 4, limits)
        assert ["no address of api.example within 0.05 s" in str(error) for error in found] == [True] * 4
        assert asked == ["api.example"]
    finally:
        answers.set()


@both
def test_a_name_with_several_addresses_is_tried_until_one_connects(server, puts, monkeypatch):
    """As localhost, which is ::1 first, where nothing listens."""
    addresses = [("127.0.0.2", 0), ("127.0.0.1", 0)]
    infos = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", address) for address in addresses]
    looked_up = socket.getaddrinfo
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, *rest, **more: infos if host == "api.example" else looked_up(host, *rest, **more),
    )
    (put,), _ = puts([server.url.replace("127.0.0.1", "api.example")], 1, limits=ONCE)
    assert put.status == "stored"
    assert server.headers[0]["host"].startswith("api.example:")


@both
def test_a_name_that_nobody_knows_is_named_with_the_reason(puts, monkeypatch):
    def getaddrinfo(host, *_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    (error,), _ = puts(["http://api.example:8000"], 1, limits=ONCE)
    assert isinstance(error, Unavailable)
    assert "Name or service not known" in str(error)


@both
def test_a_host_may_have_a_path_and_the_environment_has_no_say(server, puts, monkeypatch):
    """As behind a gateway. A proxy of the environment isn't used: settings are read in one place."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    (put,), _ = puts([f"{server.url}/gateway/"], 1, limits=ONCE)
    assert put.status == "stored"
    assert server.targets == [f"/gateway/v1/m/cells/{ROW}/A/0"]


@both
def test_a_certificate_is_verified_and_one_that_is_refused_is_named(server, puts, tmp_path, monkeypatch):
    """I17. The error is ours, whatever the library makes of it."""
    url = encrypt(server, tmp_path / "ca.pem")
    (error,), _ = puts([url], 1, limits=ONCE)
    assert type(error) is Unavailable
    assert "its certificate is refused: unable to get local issuer certificate" in str(error)
    monkeypatch.setenv("SCHEMALESS_CA", str(tmp_path / "ca.pem"))
    (put,), _ = puts([url], 1, limits=ONCE)
    assert getattr(put, "status", put) == "stored"


def test_targets_arrive_as_they_were_written(server):
    """Both libraries send the same: escapes stay as they are, and a parameter may come several times."""
    params = {"a": ["1", "x,y"], "b": "2026-01-01T00:00:00+00:00", "c": "ü &%"}
    with Client([server.url], datastore="m") as client:
        client.document("/triggers/a%20b", **params)

    async def ask():
        async with AsyncClient([server.url], datastore="m") as client:
            await client.document("/triggers/a%20b", **params)

    asyncio.run(ask())
    query = "a=1%2Cx%2Cy&b=2026-01-01T00%3A00%3A00%2B00%3A00&c=%C3%BC+%26%25"
    assert server.targets == [f"/v1/m/triggers/a%20b?{query}"] * 2


def test_an_async_client_serves_the_event_loop_that_asks(server):
    """A program may call asyncio.run more than once."""
    client = AsyncClient([server.url], datastore="m", limits=ONCE)

    async def put():
        try:
            return await client.put_cell(ROW, "A", 1, {})
        finally:
            await client.close()

    assert [asyncio.run(put()).status, asyncio.run(put()).status] == ["stored", "stored"]


def test_an_async_client_that_outlives_its_event_loop_is_quiet(server):
    """A program that calls asyncio.run again, or ends, without closing its client is told nothing by the library."""
    ran = subprocess.run(
        [sys.executable, "-X", "dev", "-c", TWO_LOOPS, server.url, ROW], check=False, capture_output=True, timeout=120
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, b"stored stored\n", b"")
    assert server.connections == 2  # a connection belongs to its loop


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1:1", "localhost", "ftp://one", "http://", "http://one:port", "http://one:99999", "http://a b",
     "http://one?x=1", "http://one/#x", "http://me:secret@one", "http://[::1", "", "http://one\n", "http://one..two"],
)  # fmt: skip
@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_host_that_is_no_url_is_refused_at_once(kind, host):
    """It isn't tried eight times."""
    with pytest.raises(Misconfigured, match="is no URL of an API"):
        kind([host], datastore="m")


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_token_that_no_header_can_hold_is_refused_and_not_shown(kind):
    with pytest.raises(Misconfigured, match="token") as refused:
        kind(["http://one"], datastore="m", token="sl_secret\nx: y")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("key", ["", "x" * 201, "a\nb", "ü"])
def test_an_idempotency_key_that_no_header_can_hold_is_refused(server, key):
    with Client([server.url], datastore="m") as client, pytest.raises(Invalid) as refused:
        client.put(ROW, "A", {}, idempotency_key=key)
    assert refused.value.field == "idempotency_key"
    assert server.targets == []
