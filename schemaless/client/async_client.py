"""AsyncClient: the asyncio driver of the client's core. The calls are those of `Client`, to be awaited."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from msgspec import UNSET, UnsetType

from schemaless.client import answers
from schemaless.client.aiohttp_transport import AiohttpTransport
from schemaless.client.answers import (
    EntriesPage,
    Entry,
    LogPage,
    PutAnswer,
    PutResult,
    ReadCell,
    VersionsPage,
    awaited_version,
    is_ready,
)
from schemaless.client.attempts import Attempts, Hosts, Limits
from schemaless.client.entry_pages import EntryPages
from schemaless.client.exchange import ClientRequest, ClientResponse, Flow
from schemaless.client.programs import AsyncProgram
from schemaless.client.put_batch import NewCell, put_cells
from schemaless.client.requests import (
    Body,
    BuildLimits,
    CellName,
    CheckOptions,
    Key,
    LogLocation,
    LogOptions,
    ReadFrom,
    Requests,
    VersionsOptions,
)
from schemaless.client.tail import LogTail, Shards, TailOptions
from schemaless.client.transport import AsyncTransport, headers_of, settings_of
from schemaless.errors import NotFound, NotReady, SchemalessError, StateConflict, Unavailable
from schemaless.found_cell import FoundCell
from schemaless.location import ShardLocation

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")


class AsyncClient:
    """Reads and writes cells of one datastore over HTTP, as `Client` does. Tasks of one event loop may share it."""

    def __init__(
        self,
        hosts: Sequence[str] = (),
        *,
        datastore: str,
        token: str | None = None,
        limits: Limits | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        settings = settings_of(hosts, token)
        self._requests = Requests(datastore)
        self._hosts = Hosts(settings.hosts)
        self._limits = limits or Limits()
        headers = headers_of(settings)
        self._transport: AsyncTransport
        if transport is None:
            self._transport = AiohttpTransport(settings, self._limits, headers)
        else:
            from schemaless.client.httpx_transport import AsyncHttpxTransport  # whoever gives one has httpx

            self._transport = AsyncHttpxTransport(transport, headers)

    def caused_by(self, cause: str) -> AsyncClient:
        """Returns a client whose puts carry a cause. It shares the connections of this one. Raises Invalid."""
        other = copy.copy(self)
        other._requests = self._requests.caused_by(cause)
        return other

    async def put_cell(self, row_key: Key, column: str, ref_key: int, body: Body) -> PutAnswer:
        """Writes one cell. Raises Conflict when another body is stored under that key (I1)."""
        return await self._run(self._requests.put_cell(row_key, column, ref_key, body))

    async def put(
        self, row_key: Key, column: str | ReadCell, body: Body, *, idempotency_key: str | None = None
    ) -> PutAnswer:
        """Writes the next version. The server chooses the ref_key, one above the highest.

        A cell that was read, or that was found missing, may stand for its column.
        """
        return await self._run(self._requests.put(row_key, column, body, idempotency_key))

    async def put_cells(self, cells: Iterable[NewCell | tuple[Key, str, int, Body]]) -> list[PutResult]:
        """Writes many cells. Returns a PutAnswer or a PutFailure, which is false, for each in order."""
        return await self._run(put_cells(self._requests, cells))

    async def get_cell(self, row_key: Key, column: str, ref_key: int, *, read_from: ReadFrom = None) -> ReadCell:
        return await self._run(self._requests.get_cell(row_key, column, ref_key, read_from))

    async def get_cell_latest(self, row_key: Key, column: str, *, read_from: ReadFrom = None) -> ReadCell:
        """Returns the version with the highest ref_key."""
        return await self._run(self._requests.get_cell_latest(row_key, column, read_from))

    async def get_cells(self, names: Sequence[CellName], *, read_from: ReadFrom = None) -> list[ReadCell]:
        """Returns many cells in order, each named by (row_key, column) or (row_key, column, ref_key)."""
        return await self._run(self._requests.get_cells(names, read_from))

    async def get_row(self, row_key: Key, *, read_from: ReadFrom = None) -> dict[str, FoundCell]:
        """Returns the newest version of every column, by column. A missing row is empty."""
        return await self._run(self._requests.get_row(row_key, read_from))

    async def get_versions(self, row_key: Key, column: str, **options: Unpack[VersionsOptions]) -> VersionsPage:
        """Returns versions of a column, lowest and highest ref_key included."""
        return await self._run(self._requests.get_versions(row_key, column, options))

    async def get_cells_for_shard(
        self, shard: int, location: LogLocation = None, limit: int = 100, **options: Unpack[LogOptions]
    ) -> LogPage:
        """Returns a page of a shard's log after a location, or since a time. Continue after its `position`.

        Raises LocationGone for a location past the head, of a superseded or unknown generation, or where the log has
        another cell than the digest says.
        """
        return await self._run(self._requests.get_cells_for_shard(shard, location, limit, options))

    async def get_cells_for_shards(
        self, locations: Mapping[int, LogLocation], limit: int = 100, *, read_from: ReadFrom = None
    ) -> dict[int, LogPage | SchemalessError]:
        """Returns a page of each shard. A shard that can't be read has an error in place of its page."""
        return await self._run(self._requests.get_cells_for_shards(locations, limit, read_from))

    def tail(self, shards: Shards = None, location: LogLocation = None, **options: Unpack[TailOptions]) -> AsyncTail:
        """Returns the cells of one shard, several or all after a location, and then every new cell, without end.

        Raises what a page of a log raises, and Corrupt when the log has a hole. It may be iterated on after an error.
        """
        return AsyncTail(self, LogTail(self._requests.base, shards, location, options))

    def index(self, name: str) -> AsyncIndex:
        return AsyncIndex(self, name)

    async def indexes(self) -> list[dict[str, Any]]:
        """Returns the documents of all indexes by name, as `index(name).status()` does, without `lag` and `cleaner`."""
        return await self._run(self._requests.list_indexes())

    def program(self, name: str) -> AsyncProgram:
        return AsyncProgram(self, name)

    async def explain(
        self, where: Key | ShardLocation, *, limit: int = 100, read_from: ReadFrom = None
    ) -> dict[str, Any]:
        """Returns what happened to a row and what it waits for. `where` is its key, or the location of a cell of it.

        Raises NotFound for a row without cells.
        """
        return await self._run(self._requests.explain(where, limit, read_from))

    async def document(self, path: str, **params: Any) -> dict[str, Any]:
        """Returns the document of /shards, /status, /conflicts, /indexes, /indexes/NAME or /topology."""
        return await self._run(self._requests.get_json(path, params))

    async def close(self) -> None:
        await self._transport.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _run(self, flow: Flow[T]) -> T:
        try:
            request = next(flow)
            while True:
                request = flow.send(await self._exchange(request))
        except StopIteration as done:  # perhaps before its first request
            result: T = done.value
            return result

    async def _exchange(self, request: ClientRequest) -> ClientResponse:
        if request.delay_s:
            await asyncio.sleep(request.delay_s)
        async with self._transport.place():
            attempts = Attempts(self._hosts, self._limits, time.monotonic())
            while True:
                attempt = attempts.begin(time.monotonic(), request.wait_s)
                try:
                    response = await self._transport.send(request, attempt.url, attempt.timeout_s)
                except Unavailable as error:
                    pause_s = attempts.broken(attempt, str(error), time.monotonic())
                else:
                    pause = attempts.answered(attempt, response, time.monotonic())
                    if pause is None:
                        return response
                    pause_s = pause
                finally:
                    attempts.end(attempt)
                await asyncio.sleep(pause_s)


class AsyncTail(AsyncIterator[FoundCell]):
    """The cells that `AsyncClient.tail` returns. One task at a time may wait for its next cell."""

    def __init__(self, client: AsyncClient, tail: LogTail) -> None:
        self._client = client
        self._tail = tail

    @property
    def locations(self) -> Mapping[int, LogLocation]:
        """The position of each shard after the cells that were given. `client.tail(locations)` continues there."""
        return self._tail.locations

    async def __anext__(self) -> FoundCell:
        while (cell := self._tail.take()) is None:
            await self._client._run(self._tail.fetch())
        return cell


class AsyncIndex:
    """One index of a client's datastore."""

    def __init__(self, client: AsyncClient, name: str) -> None:
        self._client = client
        self._name = name

    async def query(self, **terms: Any) -> EntriesPage:
        """Returns a page of entries by `field=value` (the shard field is required), `field__gte=value` and so on.

        Operators are ne, lt, lte, gt, gte, in, between, prefix and isnull. Options are order, desc, limit, cursor,
        fields, include, verify, explain, after, wait and read_from.
        """
        client = self._client
        return await client._run(client._requests.query_index(self._name, terms))

    def entries(self, **terms: Any) -> AsyncEntryIterator:
        """Returns all entries of a query, page after page. `limit` is the size of a page."""
        return AsyncEntryIterator(self._client, EntryPages(self._client._requests, self._name, terms))

    async def define(
        self, definition: Mapping[str, Any], *, change: bool = False, hold: bool = False, keep: str | None = None
    ) -> dict[str, Any]:
        """Creates the index, and returns its document. The same definition again changes nothing.

        `change`: an index with another definition gets a new version, which answers once it is complete, with `hold`
        once `switch` is called. The version before is kept for `keep`, such as "30m". Raises Conflict when another
        definition has its name and no change is asked for.
        """
        client = self._client
        return await client._run(
            client._requests.define_index(self._name, definition, change=change, hold=hold, keep=keep)
        )

    async def status(self) -> dict[str, Any]:
        """Returns the index's document: its state, why it failed, how far it is, what to do, and its versions."""
        client = self._client
        return await client._run(client._requests.get_index(self._name))

    async def wait(self, timeout_s: float = 3600.0) -> dict[str, Any]:
        """Returns the index's document once it is active. Its change, if there is one, answers or waits for `switch`.

        Raises StateConflict if it is paused, has failed or is dropped meanwhile, NotFound if it was before, and
        NotReady after `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        document = await self.status()
        while not is_ready(awaited_version(document)):
            if time.monotonic() > deadline:
                hint = awaited_version(document).get("what_to_do")
                raise NotReady(f"index {self._name} isn't active after {timeout_s:.0f} s", hint=hint)
            await asyncio.sleep(answers.INDEX_POLL_S)
            try:
                document = await self.status()
            except NotFound as error:
                raise StateConflict(f"index {self._name} was dropped meanwhile", hint=error.hint) from error
        return document

    async def problems(
        self, version: int | None = None, *, limit: int | None = None, cursor: str | None = None
    ) -> dict[str, Any]:
        """Returns a page of the values that don't fit the types of the index, and `count`, their exact number.

        `version` is as in `pause`.
        """
        client = self._client
        return await client._run(client._requests.index_problems(self._name, version, limit, cursor))

    async def verify(self, version: int | None = None, **options: Unpack[CheckOptions]) -> dict[str, Any]:
        """Orders that the index, or one version of it, is compared with its cells. `job` tells what came of it.

        Raises NotReady for a version that isn't complete.
        """
        client = self._client
        return await client._run(client._requests.check_index(self._name, "verify", version, options))

    async def repair(self, version: int | None = None, **options: Unpack[CheckOptions]) -> dict[str, Any]:
        """Orders the same as `verify`, and that entries on masters are brought to what the cells say."""
        client = self._client
        return await client._run(client._requests.check_index(self._name, "repair", version, options))

    async def job(self, job: str) -> dict[str, Any]:
        """Returns what came of a `verify` or a `repair` so far. Its `state` is running, done or dropped."""
        return await self._client.document(f"/jobs/{job}")

    async def switch(
        self, version: int | None = None, *, back: bool = False, keep: str | None = None
    ) -> dict[str, Any]:
        """Lets another version answer: the newest one, with `back` the one before, or the one with a number.

        The version that answered until now is kept for `keep`, such as "30m".
        """
        client, wanted = self._client, {"version": version, "back": back, "keep": keep}
        return await client._run(client._requests.order_index(self._name, "switch", details=wanted))

    async def drop(self, version: int | None = None) -> dict[str, Any]:
        """Drops the index in whatever state it is, or one version of it. Returns its document.

        The name of a dropped index may be used again at once.
        """
        client = self._client
        return await client._run(client._requests.drop_index(self._name, version))

    async def pause(self, version: int | None = None) -> dict[str, Any]:
        """Lets no indexer work on the index. If it was complete, it goes on to answer with what it has.

        Without `version` this means the change, if the index is being changed.
        """
        client = self._client
        return await client._run(client._requests.order_index(self._name, "pause", version))

    async def resume(self, version: int | None = None) -> dict[str, Any]:
        """Lets indexers work on the index again, also if it has failed. `version` is as in `pause`."""
        client = self._client
        return await client._run(client._requests.order_index(self._name, "resume", version))

    async def throttle(
        self,
        cells_per_s: int | UnsetType | None = UNSET,
        version: int | None = None,
        **limits: Unpack[BuildLimits],
    ) -> dict[str, Any]:
        """Bounds what each indexer process may take of the servers for the index. What isn't given stays as it is.

        `cells_per_s`: how many cells a second it delivers, 0 and None: no bound. `version` is as in `pause`.
        """
        client = self._client
        return await client._run(client._requests.throttle_index(self._name, version, cells_per_s, limits))


class AsyncEntryIterator(AsyncIterator[Entry]):
    """The entries that `AsyncIndex.entries` returns."""

    def __init__(self, client: AsyncClient, pages: EntryPages) -> None:
        self._client = client
        self._pages = pages

    @property
    def page(self) -> EntriesPage | None:
        """The last page that was fetched, with its freshness."""
        return self._pages.page

    async def __anext__(self) -> Entry:
        while (entry := self._pages.take()) is None:
            if self._pages.at_end:
                raise StopAsyncIteration
            await self._client._run(self._pages.fetch())
        return entry
