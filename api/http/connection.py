"""Connection: the HTTP/1.1 of one client's connection: where a request begins and ends, and what follows its response.

httptools reads the bytes, and uvicorn runs the application. This file decides the framing (RFC 9112) between them. It
holds the bounds of a connection (I14): heads have a deadline and a size, and clients have to take their responses.
"""

from __future__ import annotations

import asyncio
import re
import urllib.parse
from http import HTTPStatus
from typing import Any, ClassVar, cast

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from api.http.request import PAYLOAD_COMPLETE
from api.http.response import HEAD_TOO_LARGE_KIND, ProblemKind, Response, document_response, problem, problem_response
from schemaless.errors import Malformed, Unavailable

STALL_TIMEOUT_S = 15.0
STOP_STALL_TIMEOUT_S = 1.0
"""While the process stops: a reader that takes nothing would keep it from ending."""
TAKEN_BYTES_PER_S_MIN = 2048
"""A reader that takes less of what waits for it is cut off."""
HEAD_BYTES_MAX = 64 << 10
HEADERS_MAX = 100
UNREAD_BYTES_MAX = 16 << 20
"""Of a payload whose request has its response already: no more than that is worth keeping the connection for.

A longer one is read as far as that, so that its response isn't lost to a reset. The response says that it is the last.
"""
NO_HTTP = problem_response(Malformed("the request is not valid HTTP"))
NO_ROOM = problem_response(Unavailable("too many connections"))
HEAD_TOO_LARGE = document_response(
    problem(HEAD_TOO_LARGE_KIND, f"path and headers have at most {HEAD_BYTES_MAX} bytes and {HEADERS_MAX} headers")
)
UNKNOWN_CODING = document_response(
    problem(
        ProblemKind(501, "transfer-coding", "The transfer coding is not known here"),
        "send the payload with Content-Length, or with the one Transfer-Encoding: chunked",
    )
)
UNKNOWN_VERSION = document_response(
    problem(ProblemKind(505, "http-version", "The version of HTTP is not known here"), "send HTTP/1.1 or HTTP/1.0")
)
_EXTENSIONS: dict[str, dict[object, object]] = {PAYLOAD_COMPLETE: {}}
_CLOSE_TIMEOUT_S = 1.0
"""For what a client says to the end of its TLS, where another one waits for its place. uvloop waits for 30 seconds."""
_ASGI = {"version": "3.0", "spec_version": "2.3"}
_ENCODED_SLASH = re.compile(b"%2f", re.IGNORECASE)
_VERSIONS = ("1.0", "1.1")


class UnservedHead(Exception):
    """A head isn't served. The parser ends at it."""


class Cycle(RequestResponseCycle):
    """One request and its response. `sender_closed`: the client closed its sending side, and may still read."""

    sender_closed = False
    _was_read = False

    async def receive(self) -> Any:
        """Returns the next part of the payload. A client that closed its sending side counts as gone after the last
        part, so that nobody waits for the log with it. Its response is sent all the same.
        """
        if self.waiting_for_100_continue and not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.waiting_for_100_continue = False
        if not (self.disconnected or self.response_complete or self.sender_closed):
            self.flow.resume_reading()
            await self.message_event.wait()
            self.message_event.clear()
        if self.disconnected or self.response_complete or (self.sender_closed and (self.more_body or self._was_read)):
            return {"type": "http.disconnect"}
        payload = bytes(self.body)
        self.body = bytearray()
        self._was_read = not self.more_body
        return {"type": "http.request", "body": payload, "more_body": self.more_body}


class CarefulCycle(Cycle):
    """The last request of its connection, or that of a client which waits for leave to send its payload.

    `ends_with_payload`: it ends once the payload has come. A close before is a reset, which may cost the response.
    """

    ends_with_payload = False
    _ends_with_connection = False

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            if self.waiting_for_100_continue:  # nobody can tell whether the payload still comes
                self.keep_alive = False
            elif self.scope["http_version"] == "1.0" and not any(
                name.lower() == b"content-length" for name, _ in message.get("headers", ())
            ):
                self.chunked_encoding = False  # HTTP/1.0 has no chunks
                self._ends_with_connection = True
            elif self.more_body and not (self.keep_alive or self.sender_closed):
                await super().send(message)
                self.keep_alive = self.ends_with_payload = True
                return
        elif self._ends_with_connection:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


class Connection(HttpToolsProtocol):
    """A uvicorn protocol that sends head and body in one write, and marks a request as complete when its last byte has
    arrived.

    Requests that arrive behind each other are answered in order. `cycle` is the newest one, `_running` the one that is
    served, and `pipeline` has those between, the newest first.
    """

    head_timeout_s = 10.0  # for the path and headers of a request to arrive
    connections_max = 1 << 20
    handshakes_max = 1 << 20
    is_draining: ClassVar[bool] = False
    _pauses = 0
    _stall_timeout_s = STALL_TIMEOUT_S
    _head_deadline: asyncio.TimerHandle | None = None
    _in_head = True
    _head_has_begun = False
    _head_bytes = 0
    """What arrived since the last byte of a payload: of a head, of trailers, or beside chunks."""
    _refusal = NO_HTTP
    _idle_since = 0.0
    _running: Cycle | None = None
    _transfer_coding = b""
    _is_long = False
    _unread_bytes = 0
    _has_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(cast(asyncio.Transport, CoalescingTransport(transport, self.loop)))
        self._idle_since = self.loop.time()
        if len(self.connections) > self.connections_max and not self._make_room():
            self._end(NO_ROOM)
        else:
            self._set_head_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unset_head_deadline()
        for cycle in self._unanswered():
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]  # as asyncio has it
        """Returns whether the connection stays open: for the responses to what has arrived."""
        if self.is_idle or self.scheme == "https":  # TLS has no half of a connection
            self.transport.close()  # behind what was written in this turn of the loop
            return False
        for cycle in self._unanswered():
            cycle.sender_closed = True
            cycle.message_event.set()
        self.cycle.keep_alive = False
        return True

    def data_received(self, data: bytes) -> None:
        if self._has_refused:
            return
        self._unset_keepalive_if_required()
        self._head_bytes += len(data)
        try:
            rest = self._feed(data)
            while rest is not None:
                self._begin_without_offer()
                rest = self._feed(rest)
        except httptools.HttpParserError:
            self._refuse()
            return
        is_too_large = self._head_bytes > HEAD_BYTES_MAX
        if not self.is_idle:
            if is_too_large and self._in_head:
                self.flow.pause_reading()  # until the request before it has its response
            elif is_too_large:
                self._refusal = HEAD_TOO_LARGE
                self._refuse()
        elif is_too_large and self._in_head:
            self._end(HEAD_TOO_LARGE)
        elif (
            self._head_deadline is None and self.timeout_keep_alive_task is None
        ):  # also for the rest of a payload that nobody reads
            self._set_head_deadline()

    def _feed(self, data: bytes | memoryview) -> memoryview | None:
        """Returns what is behind a head that offers to speak another protocol: the parser ends there."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            return memoryview(data)[offer.args[0] :]
        return None

    def _begin_without_offer(self) -> None:
        """Has another parser read the same head without its offer, which is ignored (RFC 9110, 7.8)."""
        version = self.parser.get_http_version().encode()
        fields = b"".join(b"%b: %b\r\n" % field for field in self.headers if field[0] != b"upgrade")
        head = b"%b %b HTTP/%b\r\n%b\r\n" % (self.parser.get_method(), self.url, version, fields)
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.parser.feed_data(head)

    def on_message_begin(self) -> None:
        self._unset_keepalive_if_required()
        self.url = b""
        self.expect_100_continue = False
        self.headers = []
        self._head_has_begun = True
        self._transfer_coding = b""
        self._is_long = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            return  # trailers tell nothing that was not said before
        name = name.lower()
        if name == b"expect":
            self.expect_100_continue = value.lower() == b"100-continue"
        elif name == b"transfer-encoding":
            self._transfer_coding += value.lower()
        elif name == b"content-length":
            self._is_long = int(value) > UNREAD_BYTES_MAX  # digits only: the parser has looked
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        parser = self.parser
        method = parser.get_method()
        if parser.should_upgrade() and method != b"CONNECT":
            return
        if len(self.headers) > HEADERS_MAX or (self._head_bytes > HEAD_BYTES_MAX and self._size() > HEAD_BYTES_MAX):
            raise self._refused(HEAD_TOO_LARGE)
        version = parser.get_http_version()
        if version not in _VERSIONS:
            raise self._refused(UNKNOWN_VERSION)
        if self._transfer_coding and (self._transfer_coding != b"chunked" or version == "1.0"):
            raise self._refused(UNKNOWN_CODING)
        if method == b"CONNECT":
            raise self._refused(NO_HTTP)
        scope = self._scope(method.decode("ascii"), version)
        self._in_head = self._head_has_begun = False
        self._unset_head_deadline()
        previous = self.cycle
        expects = self.expect_100_continue and version != "1.0"
        self.scope = cast(Any, scope)
        keeps = version != "1.0" and parser.should_keep_alive() and not (self.is_draining or self._is_long)
        self.cycle = (Cycle if keeps and not expects else CarefulCycle)(
            scope=self.scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=expects,
            keep_alive=keeps,
            on_response=self.on_response_complete,
        )
        if previous is None or previous.response_complete:
            self._start_asgi_task(self.cycle, self.app)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self.app))

    def _scope(self, method: str, version: str) -> dict[str, Any]:
        """Returns the ASGI scope of a head. The authority of an absolute target is the Host, whatever Host says. An
        encoded slash stays as it is: it separates nothing.
        """
        target = httptools.parse_url(self.url)
        if target.schema is not None:
            host = b"[%b]" % target.host if b":" in target.host else target.host
            authority = host + (b":%d" % target.port if target.port else b"")
            hosts = sum(name == b"host" for name, _ in self.headers)
            others = [field for field in self.headers if field[0] != b"host"]
            self.headers = [*others, *[(b"host", authority)] * max(1, hosts)]
        raw_path = target.path or b"/"
        path = raw_path.decode("ascii")
        if "%" in path:
            path = urllib.parse.unquote(_ENCODED_SLASH.sub(b"%252F", raw_path).decode("ascii"))
        return {
            "type": "http",
            "asgi": _ASGI,
            "http_version": version,
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme,
            "method": method,
            "path": path,
            "raw_path": raw_path,
            "query_string": target.query or b"",
            "root_path": "",
            "headers": self.headers,
            "state": self.app_state.copy(),
        }

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cast(Cycle, cycle)
        task = self.loop.create_task(cycle.run_asgi(app))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        cycle = self.cycle
        cycle.waiting_for_100_continue = False
        if cycle.response_complete:
            self._unread_bytes += len(body)
            if self._unread_bytes > UNREAD_BYTES_MAX:
                self.transport.close()
            return
        cycle.body += body
        if len(cycle.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        cycle.message_event.set()

    def on_message_complete(self) -> None:
        if self._in_head:
            return  # the head of an offer, which is read again
        self._in_head = True
        self._head_bytes = 0
        cycle = self.cycle
        cycle.waiting_for_100_continue = False
        cast(dict[str, Any], cycle.scope)["extensions"] = _EXTENSIONS
        cycle.more_body = False
        cycle.message_event.set()
        if isinstance(cycle, CarefulCycle) and cycle.ends_with_payload:
            cycle.keep_alive = False  # of a response that isn't complete
            if cycle.response_complete:
                self.transport.close()
        elif cycle.response_complete:  # the connection is idle only now
            self._unread_bytes = 0
            self._unset_head_deadline()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        self._idle_since = self.loop.time()
        super().on_response_complete()
        if self._head_has_begun and self.is_idle and self._head_deadline is None:  # it came behind the request
            self._set_head_deadline()

    @property
    def is_idle(self) -> bool:
        """True while no request is under way, whether or not its head has begun to arrive."""
        return self.cycle is None or self.cycle.response_complete

    def _unanswered(self) -> list[Cycle]:
        """Returns the requests without a whole response, the newest first."""
        waiting = [cast(Cycle, cycle) for cycle, _ in self.pipeline]
        running = self._running
        return waiting if running is None or running.response_complete else [*waiting, running]

    def _size(self) -> int:
        """Returns what the head has without the bytes that arrived with it."""
        return len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)

    def _make_room(self) -> bool:
        """Closes the connection that was idle for longest. False: none is. It counts until it is gone."""
        idle = [
            other
            for other in cast(set[Connection], self.connections)
            if other is not self and other.is_idle and not other.transport.is_closing()
        ]
        if not idle:
            return False
        longest = min(idle, key=lambda other: other._idle_since)
        longest.transport.close()
        self.loop.call_later(_CLOSE_TIMEOUT_S, longest.transport.abort)
        return True

    def _set_head_deadline(self) -> None:
        self._head_deadline = self.loop.call_later(self.head_timeout_s, self._end_if_idle)

    def _unset_head_deadline(self) -> None:
        if self._head_deadline is not None:
            self._head_deadline.cancel()
            self._head_deadline = None

    def _end_if_idle(self) -> None:
        self._head_deadline = None
        if self.is_idle and not self.transport.is_closing():
            self.transport.close()

    def _refused(self, response: Response) -> UnservedHead:
        self._refusal = response
        return UnservedHead()

    def _refuse(self) -> None:
        """Answers what is no request with a problem document, and closes. Earlier requests get their responses first,
        and then nothing is said.
        """
        self._has_refused = True
        unanswered = self._unanswered()
        if not unanswered and self.cycle is not None and self.cycle.more_body:
            self.transport.close()  # the rest of a payload, whose request has its response
            return
        if unanswered and self.cycle.more_body:  # its payload is no HTTP any longer
            broken = unanswered.pop(0)
            if not unanswered and broken.response_started:
                self.transport.close()
                return
            if unanswered:
                self.pipeline.popleft()
        if unanswered:
            self.cycle = unanswered[0]
            self.cycle.keep_alive = False
            self.flow.pause_reading()
        else:
            self._end(self._refusal)

    def _end(self, response: Response) -> None:
        """Answers before there is a request, and closes."""
        if not self.transport.is_closing():
            head = b"HTTP/1.1 %d %b\r\n" % (response.status, HTTPStatus(response.status).phrase.encode())
            headers = (*response.headers, (b"content-length", b"%d" % len(response.body)), (b"connection", b"close"))
            fields = b"".join(b"%b: %b\r\n" % header for header in headers)
            self.transport.write(head + fields + b"\r\n" + response.body)
            self.transport.close()

    def pause_writing(self) -> None:
        """The transport holds more than it should: the reader must take some of it in time (I14)."""
        super().pause_writing()
        self._pauses += 1
        self._look_again(self._pauses, self.transport.get_write_buffer_size())

    def drain(self) -> None:
        """Has the last response under way close the connection."""
        if not self.is_idle:
            self.cycle.keep_alive = False

    def shutdown(self) -> None:
        super().shutdown()
        self._stall_timeout_s = STOP_STALL_TIMEOUT_S
        if self.flow.write_paused:
            self._look_again(self._pauses, self.transport.get_write_buffer_size())

    def _look_again(self, pause: int, left: int) -> None:
        self.loop.call_later(self._stall_timeout_s, self._cut_off_if_stalled, pause, left)

    def _cut_off_if_stalled(self, pause: int, left_before: int) -> None:
        if not self.flow.write_paused or pause != self._pauses:
            return
        left = self.transport.get_write_buffer_size()
        if left_before - left >= TAKEN_BYTES_PER_S_MIN * self._stall_timeout_s:
            self._look_again(pause, left)
        else:
            self.transport.abort()


# CoalescingTransport: what a connection writes in one turn of the event loop leaves in one system call.


class CoalescingTransport:
    """A transport that writes once per iteration of the event loop.

    uvicorn writes head and body of a response separately. uvloop makes a system call of each, which wakes the client
    twice for one response.
    """

    __slots__ = ("_loop", "_pieces", "_transport")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._pieces: list[bytes] = []

    def write(self, data: bytes) -> None:
        if not data:
            return
        if not self._pieces:
            self._loop.call_soon(self._flush)
        self._pieces.append(data)

    def close(self) -> None:
        """Closes after everything written so far."""
        self._flush()
        self._transport.close()

    def is_closing(self) -> bool:  # uvicorn asks for each response: __getattr__ would cost more
        return self._transport.is_closing()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def _flush(self) -> None:
        if self._pieces:
            if not self._transport.is_closing():
                self._transport.write(b"".join(self._pieces))
            self._pieces.clear()
