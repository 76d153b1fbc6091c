"""Honest clients beside 510 hostile connections: they get no error, and what they were told is stored is readable.

The hostile ones are idle, send a payload byte by byte, or don't read what they asked for. Times are measured in turns,
without and with them, and printed: docs/security.md has those of a long run.
"""

import json
import os
import resource
import socket
import time
import uuid

import httpx
import pytest

from tests.integration.api.api_harness import api_process

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

LONG = bool(os.environ.get("SCHEMALESS_FAULTS_LONG"))
TURNS, PAIRS = 8, 150
OF_EACH_KIND = 170
VERSIONS = 20


@pytest.fixture(scope="module")
def many_sockets():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def open_hostile(port, prefix, large_row):
    """Returns the connections. Those that don't read have a small buffer, so the answer waits in the process."""
    head = "HTTP/1.1\r\nhost: localhost\r\n"
    slow = f"PUT {prefix}/cells/{uuid.uuid4()}/BASE/1 {head}content-length: 1000000\r\n\r\n{{"
    unread = f"GET {prefix}/cells/{large_row}/V/versions?limit=1000 {head}\r\n"
    found = []
    for sent in ("", slow, unread):
        for _ in range(OF_EACH_KIND):
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", port))
            sock.sendall(sent.encode())
            found.append(sock)
    return found


def pairs(client, prefix, stored):
    """Puts and gets new rows, and returns how long each took. Raises AssertionError for any other outcome."""
    times = []
    for number in range(PAIRS):
        path = f"{prefix}/cells/{uuid.uuid4()}/BASE/1"
        for method, status in (("PUT", 201), ("GET", 200)):
            began = time.perf_counter()
            answer = client.request(method, path, json={"n": number} if method == "PUT" else None)
            times.append(time.perf_counter() - began)
            assert answer.status_code == status, answer.text
        stored.append((path, {"n": number}))
    return times


def p99_ms(times):
    return sorted(times)[int(len(times) * 0.99)] * 1000


if LONG:

    def test_honest_clients_get_no_error_beside_hostile_ones(running, make_datastore, many_sockets):
        """In turns with quiet spells, on new connections each time."""
        prefix = f"/v1/{make_datastore().name}"
        quiet, attacked, stored, row = [], [], [], uuid.uuid4()
        with api_process(running.path) as api:
            for version in range(VERSIONS):
                body = json.dumps({"a": os.urandom(400_000).hex()})
                assert api.client.put(f"{prefix}/cells/{row}/V/{version}", content=body).status_code == 201
            for _ in range(TURNS):
                with httpx.Client(base_url=api.client.base_url, timeout=20) as client:
                    quiet += pairs(client, prefix, stored)
                    hostile = open_hostile(api.port, prefix, row)
                    try:
                        attacked += pairs(client, prefix, stored)
                    finally:
                        for sock in hostile:
                            sock.close()
            for path, body in stored:
                assert api.client.get(path).json()["body"] == body
            assert api.process.poll() is None
        print(f"\np99 of {len(quiet)} honest calls: {p99_ms(quiet):.1f} ms quiet, {p99_ms(attacked):.1f} ms attacked")
