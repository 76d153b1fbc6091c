"""Raw connections: sends a row of tests/raw_requests.py, and reads the responses one by one."""

from __future__ import annotations

import http.client
import re
import socket
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass

from tests.raw_requests import Row

PIECES_APART_S = 0.02
PROBE = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
ALIVE = b'{"status":"alive"}\n'


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes
    headers: http.client.HTTPMessage


class Talk:
    """One connection. `answer` reads the next response, or returns None at the end."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = self._socket.makefile("rb")

    def send(self, *pieces: bytes) -> None:
        with suppress(ConnectionError):  # it may close before it has taken everything
            for number, piece in enumerate(pieces):
                if number:
                    time.sleep(PIECES_APART_S)
                self._socket.sendall(piece)

    def half_close(self) -> None:
        self._socket.shutdown(socket.SHUT_WR)

    def answer(self, method: str = "GET") -> Answer | None:
        reader = self._reader

        class Shared:  # http.client closes what it read, and the next response would be lost with it
            def makefile(self, mode: str) -> object:
                return _Kept(reader)

        response = http.client.HTTPResponse(Shared(), method=method)  # type: ignore[arg-type]
        try:
            response.begin()
            return Answer(response.status, response.read(), response.headers)
        except (http.client.RemoteDisconnected, ConnectionError):
            return None

    def line(self) -> bytes:
        return self._reader.readline()

    def close(self) -> None:
        self._reader.close()
        self._socket.close()


class _Kept:
    def __init__(self, reader: object) -> None:
        self._reader = reader

    def close(self) -> None:
        pass

    def __getattr__(self, name: str) -> object:
        return getattr(self._reader, name)


def methods_of(row: Row) -> list[str]:
    """The methods of the requests in a row: a response to HEAD has no body."""
    return ["HEAD" if row.method == "HEAD" else "GET", *("HEAD" if status == 404 else "GET" for status in row.behind)]


def bytes_of(row: Row, datastore: str) -> tuple[tuple[bytes, ...], str]:
    """Returns what is sent, and the path of the row's cell."""
    path = f"/v1/{datastore}/cells/{uuid.uuid4()}"
    pieces = [re.sub(b"@(?=[/%])", path.encode(), piece) for piece in row.pieces]
    payload_bytes = len(b"".join(pieces).partition(b"\r\n\r\n")[2])
    return tuple(piece.replace(b"length: #", b"length: %d" % payload_bytes) for piece in pieces), path


def statuses(talk: Talk, row: Row) -> list[int]:
    """Returns the statuses of the row's own responses."""
    found = []
    for method in methods_of(row)[: 1 + len(row.behind)]:
        answer = talk.answer(method)
        if answer is None:
            return found or [0]
        found.append(answer.status)
    return found
