"""Request: what a handler reads of one HTTP request: its path, query, headers and payload.

Payloads are read within a bound each, and within a bound on all of a process together (I14). A small payload comes in
one message and is covered by the bound on concurrent requests. Only longer ones are counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

from api.http.budget import SMALL_BYTES_MAX, Held, share_of_token
from api.http.content import Format, request_format, response_format
from api.http.response import Response
from schemaless.access import Token
from schemaless.contract.parameters import Parameter, parse_query
from schemaless.errors import Malformed, TooLarge, TooManyRequests, Unavailable, UnsupportedMedia
from schemaless.topology import Datastore

if TYPE_CHECKING:
    from api.state import ApiState

Receive = Callable[[], Awaitable[Any]]
Scope = MutableMapping[str, Any]
PAYLOAD_COMPLETE = "schemaless.payload_complete"
"""The server's ASGI extension of a request whose payload has arrived as a whole: reading it needs no time-out."""


PAYLOAD_GRACE_S = 5.0
"""How long a payload may take before its rate counts."""
PAYLOAD_BYTES_PER_S_MIN = 16 << 10
PAYLOAD_TIMEOUT_S = 30.0
"""Time for a payload to arrive over a slow line. Then its connection holds no request any longer."""
NEXT_PART_TIMEOUT_S = 1.0
_WITHOUT_PAYLOAD = frozenset({"GET", "HEAD", "DELETE", "OPTIONS"})


class Request:
    """One request of a route of ours. `path` holds the parameters of the path as text, not yet parsed. `token` is the
    caller's, or None where none is needed.

    A handler sets `following` while it waits for the log to grow, and `repeatable` to False where the same request
    sent twice may write twice. `action` is what the log of admin actions shall say beside method and path.
    """

    __slots__ = (
        "_headers",
        "_held_bytes",
        "_read",
        "_receive",
        "_scope",
        "action",
        "arriving",
        "following",
        "is_dry_run",
        "path",
        "repeatable",
        "state",
        "token",
    )

    def __init__(
        self, state: ApiState, scope: Scope, receive: Receive, path: Mapping[str, str], token: Token | None = None
    ) -> None:
        self.state = state
        self.token = token
        self.path = path
        self.following = False
        self.repeatable = True
        self.action = ""
        self.is_dry_run = False
        self._scope = scope
        self._receive = receive
        self._headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))
        self._held_bytes = 0
        self._read: Held | None = None
        self.arriving = False

    async def datastore(self) -> Datastore:
        """Raises NotFound."""
        return await self.state.catalogue.datastore(self.path["datastore"])

    def header(self, name: bytes) -> bytes:
        """Returns the first value of a header, or nothing. `name` is in lower case."""
        return self._headers.get(name, b"")

    @property
    def root_path(self) -> str:
        """The prefix under which the app is mounted."""
        return str(self._scope.get("root_path", ""))

    @property
    def raw_query(self) -> bytes:
        return bytes(self._scope["query_string"])

    def query(self, *known: Parameter[Any]) -> dict[str, str]:
        """Raises Invalid for parameters that are not among `known`, repeated or malformed."""
        raw = self._scope["query_string"]
        return parse_query(raw, known) if raw else {}

    def request_format(self, *, batch: bool = False) -> Format:
        """Raises UnsupportedMedia, also for a page's request without a Content-Type."""
        if self.header(b"origin") and not self.header(b"content-type"):
            raise UnsupportedMedia("a request with an Origin needs a Content-Type")
        return request_format(self.header(b"content-type"), self.header(b"content-encoding"), batch=batch)

    def response_format(self, *, batch: bool = False) -> Format:
        return response_format(self.header(b"accept"), batch=batch)

    async def payload(self, bytes_max: int) -> bytes:
        """Returns the whole payload.

        Raises TooLarge as soon as that is known, Malformed when the payload ends early or doesn't arrive in time,
        Unavailable when the process holds too many bytes of payloads, and TooManyRequests when the token has no place.
        """
        announced = self.header(b"content-length")
        if announced.isdigit() and int(announced) > bytes_max:
            raise TooLarge(f"at most {bytes_max} bytes are taken, {int(announced)} were announced")
        if PAYLOAD_COMPLETE in self._scope.get("extensions", ()):
            # A timer that nothing waits for would cost as much as parsing a small body.
            return await self._read_payload(bytes_max)
        payload = await self._in_time(bytes_max)
        self.arrived()
        in_flight, requests_max = self.state.in_flight, self.state.settings.requests_max
        if in_flight.count > requests_max:
            raise Unavailable("too many concurrent requests: the payload arrived, and there is no room for it")
        if self.token is not None and in_flight.of(self.token) > share_of_token(requests_max):
            raise TooManyRequests(f"too many concurrent requests with the token {self.token.name!r}")
        return payload

    @property
    def is_whole(self) -> bool:
        """Whether the payload has arrived: until then the request holds nothing but its connection."""
        return PAYLOAD_COMPLETE in self._scope.get("extensions", ()) or self._scope["method"] in _WITHOUT_PAYLOAD

    async def arrives(self) -> None:
        """Counts the request as one whose payload arrives, and not as one in flight.

        Raises TooManyRequests or Unavailable where too many do, unless this one is whole with its next part: many
        clients send a small payload right behind the head.
        """
        try:
            self.state.payload_budget.begin(self.caller)
        except (TooManyRequests, Unavailable):
            self.state.in_flight.end(self.token)
            try:
                if not await self._is_whole_with_next_part():
                    raise
            finally:
                self.state.in_flight.begin(self.token)
            return
        self.arriving = True
        self.state.in_flight.end(self.token)

    async def _is_whole_with_next_part(self) -> bool:
        receive = self._receive
        try:
            async with asyncio.timeout(NEXT_PART_TIMEOUT_S):
                message = await receive()
        except TimeoutError:
            return False

        async def replay() -> Any:
            self._receive = receive
            return message

        self._receive = replay
        return not message.get("more_body")

    def arrived(self) -> None:
        """The payload is there, or nobody waits for it any longer."""
        if self.arriving:
            self.arriving = False
            self.state.payload_budget.end(self.caller)
            self.state.in_flight.begin(self.token)

    async def _in_time(self, bytes_max: int) -> bytes:
        """Reads a payload that arrives by a deadline, and at a least rate. Raises Malformed, or Unavailable."""
        loop, lag = asyncio.get_running_loop(), self.state.storage.loop_lag
        began, late_before_s = loop.time(), lag.late_s()

        def deadline(received: int) -> float:
            rate_s = PAYLOAD_GRACE_S + received / PAYLOAD_BYTES_PER_S_MIN
            return began + min(PAYLOAD_TIMEOUT_S, rate_s)

        try:
            async with asyncio.timeout_at(deadline(0)) as limit:
                return await self._read_payload(bytes_max, lambda received: limit.reschedule(deadline(received)))
        except TimeoutError:
            what = f"the payload was not there after {loop.time() - began:.0f} s"
            if loop.time() - (lag.late_s() - late_before_s) < (limit.when() or 0.0):
                raise Unavailable(f"{what}, in which this process stood still") from None
            raise Malformed(f"{what}: it came too slowly") from None

    async def _read_payload(self, bytes_max: int, progressed: Callable[[int], None] = lambda received: None) -> bytes:
        message = await self._receive()
        received = bytearray()
        while message["type"] == "http.request":
            chunk: bytes = message.get("body", b"")
            if len(received) + len(chunk) > bytes_max:
                raise TooLarge(f"at most {bytes_max} bytes are taken")
            if not received and not message.get("more_body"):
                return chunk
            self.state.payload_budget.take(len(chunk))
            self._held_bytes += len(chunk)
            received += chunk
            if not message.get("more_body"):
                return bytes(received)
            progressed(len(received))
            message = await self._receive()
        raise Malformed("the connection ended within the payload")

    def follows(self) -> None:
        """Marks a request that waits for cells which aren't there yet: it is counted and timed apart."""
        self.following = True

    @property
    def headers_only(self) -> bool:
        """True for HEAD."""
        return bool(self._scope["method"] == "HEAD")

    async def unless_hung_up(self, work: Coroutine[Any, Any, None]) -> None:
        """Does the work, or as much of it as is done when the caller's connection ends."""
        tasks = [asyncio.ensure_future(work), asyncio.ensure_future(self._hung_up())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _hung_up(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    @property
    def caller(self) -> Hashable:
        """Whose share this request counts against: its token's, else its address's. It is empty behind a proxy, whose
        address stands for nobody.
        """
        if self.token is not None:
            return self.token.digest
        client = self._scope.get("client")
        return client[0] if client and not self.state.settings.behind_proxy else ""

    @property
    def read(self) -> Held:
        """What the request holds of the bytes that the process has read and its clients have not taken yet."""
        if self._read is None:
            self._read = Held(self.state.read_budget, self.caller)
        return self._read

    def hold_response(self, size: int) -> bool:
        """Counts a response instead of what was read for it, until `release`. False: there is no room for it."""
        if size > SMALL_BYTES_MAX:
            return self.read.resize(size)
        if self._read is not None:
            self._read.resize(0)
        return True

    def release(self) -> None:
        """Gives back what the response held: its client has taken it, or has gone."""
        if self._read is not None:
            self._read.resize(0)

    def finish(self) -> None:
        """Gives back the bytes that the payload took of the process's budget. The response is made."""
        if self.arriving:
            self.arrived()
        if self._held_bytes:
            self.state.payload_budget.give_back(self._held_bytes)
            self._held_bytes = 0


Handler = Callable[[Request], Awaitable[Response]]
