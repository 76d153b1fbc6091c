"""Clients that are slow, idle, or speak no HTTP: they hold nothing that others need, and errors are documents."""

import json
import resource
import socket
import uuid
from contextlib import closing

import pytest

from tests.integration.api.api_harness import api_process

SLOW = 1050


@pytest.fixture(scope="module")
def bounded(running, shared_datastore):
    """A process with short deadlines."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    with api_process(running.path, {"api.http.connection.Connection.head_timeout_s": 1.0}) as api:
        yield api
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def connect(api):
    return socket.create_connection(("127.0.0.1", api.port), timeout=10)


def answer_to(api, *parts):
    """What the process sends until it closes, or until one answer is there."""
    with closing(connect(api)) as sock:
        try:
            for part in parts:
                sock.sendall(part)
        except OSError:  # it closed before it had taken everything
            pass
        received = b""
        try:
            while chunk := sock.recv(65536):
                received += chunk
        except ConnectionResetError:
            pass
    head, _, body = received.partition(b"\r\n\r\n")
    return head.decode().lower(), body


@pytest.mark.parametrize(
    ("parts", "status"),
    [
        ([b"BREW /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"], 400),
        ([b"PUT /v1/x/cells HTTP/1.1\r\nhost: localhost\r\ncontent-length: -1\r\n\r\n"], 400),
        ([b"POST /v1/x/batch/put HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n"], 400),
        ([b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n" + b"a: b\r\n" * 200 + b"\r\n"], 431),
        ([b"GET /healthz HTTP/1.1\r\nhost: localhost\r\na: " + b"a" * 200_000 + b"\r\n\r\n"], 431),
        ([b"GET /healthz HTTP/1.1\r\nhost: localhost\r\na: ", *[b"a" * 65_536] * 320], 431),
        ([b"GET /healthz?" + b"x" * 200_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n"], 431),
    ],
)
def test_what_is_no_request_is_answered_with_a_document(bounded, parts, status):
    """Of the protocol's errors, too; a client that goes on sending may miss its answer, but not the process."""
    head, body = answer_to(bounded, *parts)
    if head or len(parts) == 1:
        assert head.startswith(f"http/1.1 {status} ")
        assert "content-type: application/problem+json" in head
        assert "connection: close" in head
        assert json.loads(body)["status"] == status
    assert bounded.client.get("/healthz").status_code == 200


def test_a_client_that_asks_before_it_sends_a_payload(bounded, shared_datastore):
    """`Expect: 100-continue`: it is told to go on, or at once why its request is refused."""
    path = f"/v1/{shared_datastore.name}/cells/{uuid.uuid4()}/BASE/1".encode()
    head = b"PUT %b HTTP/1.1\r\nhost: %b\r\ncontent-length: %d\r\nexpect: 100-continue\r\nconnection: close\r\n\r\n"
    with closing(connect(bounded)) as sock:
        sock.sendall(head % (path, b"localhost", 8))
        assert sock.recv(4096) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(b'{"a": 1}')
        assert sock.recv(4096).startswith(b"HTTP/1.1 201 ")
    for host, length, status in ((b"localhost", 2 << 20, 413), (b"evil.example", 8, 421)):
        answered, body = answer_to(bounded, head % (path, host, length))
        assert answered.startswith(f"http/1.1 {status} ")
        assert json.loads(body)["status"] == status


def test_pipelined_requests_are_answered_in_order(bounded, shared_datastore):
    """Each after the one before has its outcome: the read sees the put."""
    path = f"/v1/{shared_datastore.name}/cells/{uuid.uuid4()}/BASE/1".encode()
    put = b'PUT %b HTTP/1.1\r\nhost: localhost\r\ncontent-length: 8\r\n\r\n{"a": 1}' % path
    get = b"GET %b HTTP/1.1\r\nhost: localhost\r\n\r\n" % path
    head = b"HEAD %b HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n" % path
    first, rest = answer_to(bounded, put + get + head)
    assert first.startswith("http/1.1 201 ")
    assert rest.count(b"HTTP/1.1 200 OK") == 2
    assert rest.count(b'"body":{"a":1}') == 1


@pytest.mark.parametrize(
    ("line", "host", "status"),
    [
        (b"GET http://localhost/healthz HTTP/1.1", b"localhost", 200),
        (b"GET http://evil.example/healthz HTTP/1.1", b"localhost", 421),
        (b"OPTIONS * HTTP/1.1", b"localhost", 404),
        (b"CONNECT evil.example:443 HTTP/1.1", b"localhost", 400),
    ],
)
def test_other_forms_of_a_target(bounded, line, host, status):
    """An absolute one is its path, and its authority is the host. This is no proxy, and no server as a whole."""
    answered, body = answer_to(bounded, line + b"\r\nhost: " + host + b"\r\nconnection: close\r\n\r\n")
    assert answered.startswith(f"http/1.1 {status} ")
    assert status == 200 or json.loads(body)["status"] == status


@pytest.mark.parametrize("sent", [b"", b"GET /healthz HTTP/1.1\r\nhost: "])
def test_a_head_has_a_deadline(bounded, sent):
    """A connection that sends none, or half of one, is closed."""
    assert answer_to(bounded, sent) == ("", b"")


def test_a_head_after_an_answer_has_a_deadline_too(bounded):
    """Its first byte ends the time for which an idle connection is kept."""
    with closing(connect(bounded)) as sock:
        sock.sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert sock.recv(4096).startswith(b"HTTP/1.1 200 ")
        sock.sendall(b"GET /he")
        assert sock.recv(4096) == b""


def test_half_a_head_behind_a_request_has_a_deadline_too(bounded):
    """It arrived with the request, so nothing arrives after the answer. An idle connection is kept for 75 seconds."""
    with closing(connect(bounded)) as sock:
        sock.settimeout(60)
        sock.sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\nGET /he")
        received = b""
        while chunk := sock.recv(4096):
            received += chunk
    assert received.startswith(b"HTTP/1.1 200 ")
    assert received.count(b"HTTP/1.1 ") == 1


def test_a_thousand_slow_payloads_cost_honest_clients_nothing(bounded, shared_datastore):
    """Each announces a megabyte and sends a byte. They are turned away or wait; nobody else notices (I14)."""
    put = b"PUT /v1/%b/cells/%b/BASE/1 HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000\r\n\r\n{"
    slow = []
    try:
        for _ in range(SLOW):
            sock = connect(bounded)
            sock.sendall(put % (shared_datastore.name.encode(), str(uuid.uuid4()).encode()))
            slow.append(sock)
        for _ in range(50):
            path = f"/v1/{shared_datastore.name}/cells/{uuid.uuid4()}/BASE/1"
            assert bounded.client.put(path, json={"a": 1}).status_code == 201
            assert bounded.client.get(path).status_code == 200
        refused = [sock for sock in slow if _first_line(sock).endswith(b"429 Too Many Requests")]
        assert len(refused) > SLOW // 2  # of one address, 250 wait
    finally:
        for sock in slow:
            sock.close()


def _first_line(sock):
    sock.setblocking(False)
    try:
        return sock.recv(4096).split(b"\r\n")[0]
    except BlockingIOError:
        return b""
