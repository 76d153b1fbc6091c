"""Closed-loop load over HTTP, in a process of its own: each connection sends its next request on an answer.

Requests are ready-made bytes and answers are only counted, so that the generator takes little of the machine that
it shares with what it measures. `run_load` is the caller's side, `python -m bench.load` the process.
"""

from __future__ import annotations

import re
import select
import socket
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

import msgspec

from bench.figures import percentile

STALLED_AFTER_S = 15.0
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


class Plan(msgspec.Struct, frozen=True):
    """Ends when the time is over or the requests are."""

    port: int
    connections: int
    seconds: float
    requests: Sequence[bytes]


class Outcome(msgspec.Struct, frozen=True):
    """`statuses` counts answers by HTTP status."""

    seconds: float
    latencies_ms: list[float]
    statuses: dict[int, int]

    @property
    def rate(self) -> float:
        return len(self.latencies_ms) / self.seconds

    @property
    def p50_ms(self) -> float:
        return percentile(self.latencies_ms, 50)

    def expect(self, status: int) -> Outcome:
        """Itself. Raises AssertionError when an answer had another status: then the figures mean nothing."""
        assert set(self.statuses) == {status}, f"expected only {status}, got {self.statuses}"
        return self


class Answer(NamedTuple):
    status: int
    body: bytes


class Connection:
    """One keep-alive connection with at most one request under way."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=STALLED_AFTER_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.settimeout(None)  # with one, each call asks first whether it would wait; epoll has the time-out
        self.sent_at = 0.0
        self._data = b""

    def send(self, request: bytes) -> None:
        self.sent_at = time.perf_counter()
        self.socket.sendall(request)

    def receive(self) -> Answer | None:
        """The answer once it is whole."""
        received = self.socket.recv(1 << 18)
        if not received:
            raise ConnectionError("the server closed a connection")
        self._data += received
        end = self._data.find(b"\r\n\r\n")
        length = _LENGTH.search(self._data, 0, end) if end >= 0 else None
        if length is None or len(self._data) < end + 4 + int(length[1]):
            return None
        answer = Answer(int(self._data[9:12]), self._data[end + 4 :])
        self._data = b""
        return answer


def run_load(port: int, requests: Sequence[bytes], *, connections: int, seconds: float) -> Outcome:
    """Runs the generator process. Each request is sent at most once."""
    plan = msgspec.msgpack.encode(Plan(port, connections, seconds, requests))
    argv = [sys.executable, "-m", "bench.load"]
    done = subprocess.run(argv, input=plan, stdout=subprocess.PIPE, check=True, timeout=seconds + 4 * STALLED_AFTER_S)
    return msgspec.msgpack.decode(done.stdout, type=Outcome)


def drive(plan: Plan) -> Outcome:
    """Sends until time or requests are over, and waits for the last answers."""
    with ExitStack() as stack:
        connections = [Connection(plan.port) for _ in range(plan.connections)]
        for connection in connections:
            stack.enter_context(connection.socket)
        return _drive(connections, plan, stack.enter_context(select.epoll()))


def _drive(connections: Sequence[Connection], plan: Plan, poll: select.epoll) -> Outcome:
    by_number = {connection.socket.fileno(): connection for connection in connections}
    waiting = deque(plan.requests)
    latencies: list[float] = []
    statuses: Counter[int] = Counter()
    started = time.perf_counter()
    deadline = started + plan.seconds
    for number, connection in by_number.items():
        poll.register(number, select.EPOLLIN)
        connection.send(waiting.popleft())
    under_way = len(connections)
    while under_way:
        for number, _ in _events(poll):
            connection = by_number[number]
            answer = connection.receive()
            if answer is None:
                continue
            now = time.perf_counter()
            latencies.append((now - connection.sent_at) * 1000)
            statuses[answer.status] += 1
            if waiting and now < deadline:
                connection.send(waiting.popleft())
            else:
                under_way -= 1
    return Outcome(time.perf_counter() - started, latencies, dict(statuses))


def _events(poll: select.epoll) -> list[tuple[int, int]]:
    events = poll.poll(STALLED_AFTER_S)
    if not events:
        raise TimeoutError(f"no answer for {STALLED_AFTER_S} s")
    return events


def main() -> None:
    plan = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Plan)
    sys.stdout.buffer.write(msgspec.msgpack.encode(drive(plan)))


if __name__ == "__main__":
    main()
