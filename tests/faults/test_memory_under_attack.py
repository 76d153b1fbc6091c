"""All hostile clients at once: the process's memory is bounded (I14), goes back, and honest clients are served."""

import json
import os
import resource
import socket
import threading
import time
import uuid
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import pytest

from tests.integration.api.api_harness import api_process

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

LONG = bool(os.environ.get("SCHEMALESS_FAULTS_LONG"))

RSS_MAX = 512 << 20
GIVEN_BACK_S = 30.0
ATTACK_S = 20.0
VERSIONS = 40


def resident(pid, which="VmRSS"):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(which))


class Attack:
    """Threads that repeat something until they are told to stop, and sockets that are kept open."""

    def __init__(self, api, datastore):
        self.api = api
        self.path = f"/v1/{datastore.name}"
        self.sockets = []
        self.stopped = threading.Event()
        self.threads = []
        self.errors = []

    def hold(self, count, sent, receive_buffer=None):
        for _ in range(count):
            sock = socket.socket()
            if receive_buffer:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            sock.settimeout(2)
            try:
                sock.connect(("127.0.0.1", self.api.port))
                sock.sendall(sent)
            except OSError:
                pass
            self.sockets.append(sock)

    def repeat(self, count, method, path, content=None):
        def run():
            import httpx

            with httpx.Client(base_url=self.api.client.base_url, timeout=60) as client:
                while not self.stopped.is_set():
                    with suppress(httpx.TransportError):
                        client.request(method, self.path + path, content=content)

        for _ in range(count):
            thread = threading.Thread(target=run, daemon=True)
            thread.start()
            self.threads.append(thread)

    def stop(self):
        self.stopped.set()
        for sock in self.sockets:
            sock.close()
        for thread in self.threads:
            thread.join(60)


def asked(call, refusals):
    """Returns the status of a call. A 503 with Retry-After is repeated a few times, as every client of ours does."""
    for _ in range(3):
        answer = call()
        if answer.status_code != 503 or "retry-after" not in answer.headers:
            break
        refusals.append(answer.text)
    return answer.status_code


if LONG:

    def test_memory_is_bounded_under_all_attacks_at_once(running, make_datastore):
        """Clients that don't read, readers of large pages and of pages that grow, slow payloads, endless heads, idle
        ones, large batches.
        """
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        datastore = make_datastore()
        # A disk that stalls may cost a put of a megabyte seconds. It is to be stored, and not buffered.
        with api_process(running.path, write_timeout_s=15.0) as api, ExitStack() as ended:
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
            ended.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
            attack = Attack(api, datastore)
            ended.callback(attack.stop)
            row = uuid.uuid4()
            for version in range(VERSIONS):
                body = json.dumps({"a": os.urandom(520_000).hex()})
                assert api.client.put(f"{attack.path}/cells/{row}/V/{version}", content=body).status_code == 201
            for version in range(16):  # a thousand bytes as it is stored
                body = json.dumps({"a": "x" * 1_000_000})
                assert api.client.put(f"{attack.path}/cells/{row}/SMALL/{version}", content=body).status_code == 201
            nested = b'{"a":[' + b",".join([b"[]"] * 49_000) + b"]}"
            item = b'{"row_key":"%b","column_name":"N","ref_key":1,"body":%b}'
            batch = b'{"cells":[' + b",".join(item % (str(uuid.uuid4()).encode(), nested) for _ in range(100)) + b"]}"
            before = resident(api.process.pid)
            host = "host: localhost"
            get = f"GET {attack.path}/cells/{row}/V/versions?limit=1000 HTTP/1.1\r\n{host}\r\n\r\n".encode()
            put = (
                f"PUT {attack.path}/cells/{row}/BASE/1 HTTP/1.1\r\n{host}\r\ncontent-length: 1000000\r\n\r\n{{".encode()
            )
            attack.hold(40, get, receive_buffer=4096)
            attack.hold(10, b"GET /healthz HTTP/1.1\r\nx-a: " + b"a" * (20 << 20))
            attack.hold(500, b"")
            attack.hold(1050, put)
            attack.repeat(16, "GET", f"/cells/{row}/V/versions?limit=1000")
            attack.repeat(64, "GET", f"/cells/{row}/SMALL/versions?limit=16")
            attack.repeat(4, "POST", "/batch/put", batch)
            honest, refusals, slowest, peak = [], [], 0.0, 0
            ends = time.monotonic() + ATTACK_S
            while time.monotonic() < ends:
                began = time.monotonic()
                path = f"{attack.path}/cells/{uuid.uuid4()}/BASE/1"
                honest.append(asked(partial(api.client.put, path, json={"a": 1}), refusals))
                honest.append(asked(partial(api.client.get, path), refusals))
                slowest = max(slowest, time.monotonic() - began)
                peak = max(peak, resident(api.process.pid))
            attack.stop()
            bound = before + (128 << 20)
            deadline = time.monotonic() + GIVEN_BACK_S
            while (after := resident(api.process.pid)) > bound and time.monotonic() < deadline:
                time.sleep(0.2)
            figures = {"before": before >> 20, "peak": resident(api.process.pid, "VmHWM") >> 20, "after": after >> 20}
            counted = {status: honest.count(status) for status in set(honest)}
            print(
                f"\nMiB: {figures}; honest: {counted}, {len(refusals)} refused at first, slowest pair {slowest:.2f} s"
            )
            assert resident(api.process.pid, "VmHWM") <= RSS_MAX
            assert after <= bound
            assert set(honest) <= {200, 201, 202, 404}
