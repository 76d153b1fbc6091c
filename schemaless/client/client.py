"""Client, the sync driver of the client's core. deploy/write_sync_client.py writes it from async_client.py."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from msgspec import UNSET, UnsetType

from schemaless.client import answers
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
from schemaless.client.exchange import ClientRequest, ClientResponse, Flow
from schemaless.client.requests import (
    Body,
    BuildLimits,
    CellName,
    CheckOptions,
    EntryPages,
    Key,
    LogLocation,
    LogOptions,
    NewCell,
    ReadFrom,
    Requests,
    VersionsOptions,
    check_order,
    put_cells,
)
from schemaless.client.tail import LogTail, Shards, TailOptions
from schemaless.client.transport import Credentials, SyncTransport
from schemaless.client.urllib3_transport import Urllib3Transport
from schemaless.contract import erasures, indexes, programs, services
from schemaless.contract.call import ApiCall
from schemaless.errors import NotFound, NotReady, SchemalessError, StateConflict, Unavailable
from schemaless.found_cell import FoundCell
from schemaless.index.definition import parse_index_name
from schemaless.location import ShardLocation
from schemaless.runtime import tracing

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")


class Client:
    """Reads and writes cells of one datastore over HTTP. Threads may share it. Close it, or use it in a `with`.

    Hosts and token that aren't given come from SCHEMALESS_HOSTS and SCHEMALESS_TOKEN, else from the embedded stack.
    Every call raises Unavailable when no host gave an answer within `limits`, and the error that a problem document
    stands for.
    """

    def __init__(
        self,
        hosts: Sequence[str] = (),
        *,
        datastore: str,
        token: str | None = None,
        limits: Limits | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._credentials = Credentials(hosts, token)
        settings, headers = self._credentials.settings, self._credentials.headers
        self._requests = Requests(datastore)
        self._hosts = Hosts(settings.hosts)
        self._limits = limits or Limits()
        self._transport: SyncTransport
        if transport is None:
            self._transport = Urllib3Transport(settings, self._limits, headers)
        else:
            from schemaless.client.httpx_transport import HttpxTransport  # whoever gives one has httpx

            self._transport = HttpxTransport(transport, headers)

    def caused_by(self, cause: str) -> Client:
        """Returns a client whose puts carry a cause. It shares the connections of this one. Raises Invalid."""
        other = copy.copy(self)
        other._requests = self._requests.caused_by(cause)
        return other

    def put_cell(self, row_key: Key, column: str, ref_key: int, body: Body) -> PutAnswer:
        """Writes one cell. Raises Conflict when another body is stored under that key (I1)."""
        return self._run(self._requests.put_cell(row_key, column, ref_key, body))

    def put(self, row_key: Key, column: str | ReadCell, body: Body, *, idempotency_key: str | None = None) -> PutAnswer:
        """Writes the next version. The server chooses the ref_key, one above the highest.

        A cell that was read, or that was found missing, may stand for its column.
        """
        return self._run(self._requests.put(row_key, column, body, idempotency_key))

    def put_cells(self, cells: Iterable[NewCell | tuple[Key, str, int, Body]]) -> list[PutResult]:
        """Writes many cells. Returns a PutAnswer or a PutFailure, which is false, for each in order."""
        return self._run(put_cells(self._requests, cells))

    def get_cell(self, row_key: Key, column: str, ref_key: int, *, read_from: ReadFrom = None) -> ReadCell:
        return self._run(self._requests.get_cell(row_key, column, ref_key, read_from))

    def get_cell_latest(self, row_key: Key, column: str, *, read_from: ReadFrom = None) -> ReadCell:
        """Returns the version with the highest ref_key."""
        return self._run(self._requests.get_cell_latest(row_key, column, read_from))

    def get_cells(self, names: Sequence[CellName], *, read_from: ReadFrom = None) -> list[ReadCell]:
        """Returns many cells in order, each named by (row_key, column) or (row_key, column, ref_key)."""
        return self._run(self._requests.get_cells(names, read_from))

    def get_row(self, row_key: Key, *, read_from: ReadFrom = None) -> dict[str, FoundCell]:
        """Returns the newest version of every column, by column. A missing row is empty."""
        return self._run(self._requests.get_row(row_key, read_from))

    def get_versions(self, row_key: Key, column: str, **options: Unpack[VersionsOptions]) -> VersionsPage:
        """Returns versions of a column, lowest and highest ref_key included."""
        return self._run(self._requests.get_versions(row_key, column, options))

    def get_cells_for_shard(
        self, shard: int, location: LogLocation = None, limit: int = 100, **options: Unpack[LogOptions]
    ) -> LogPage:
        """Returns a page of a shard's log after a location, or since a time. Continue after its `position`.

        Raises LocationGone for a location past the head, of a superseded or unknown generation, or where the log has
        another cell than the digest says.
        """
        return self._run(self._requests.get_cells_for_shard(shard, location, limit, options))

    def get_cells_for_shards(
        self, locations: Mapping[int, LogLocation], limit: int = 100, *, read_from: ReadFrom = None
    ) -> dict[int, LogPage | SchemalessError]:
        """Returns a page of each shard. A shard that can't be read has an error in place of its page."""
        return self._run(self._requests.get_cells_for_shards(locations, limit, read_from))

    def tail(self, shards: Shards = None, location: LogLocation = None, **options: Unpack[TailOptions]) -> CellIterator:
        """Returns the cells of one shard, several or all after a location, and then every new cell, without end.

        Raises what a page of a log raises, and Corrupt when the log has a hole. It may be iterated on after an error.
        """
        return CellIterator(self, LogTail(self._requests.base, shards, location, options))

    def index(self, name: str) -> Index:
        return Index(self, name)

    def indexes(self) -> list[dict[str, Any]]:
        """Returns the documents of all indexes by name, as `index(name).status()` does, without `lag` and `cleaner`."""
        found: list[dict[str, Any]] = (self.call(indexes.LIST))["indexes"]
        return found

    def program(self, name: str) -> Program:
        return Program(self, name)

    def explain(self, where: Key | ShardLocation, *, limit: int = 100, read_from: ReadFrom = None) -> dict[str, Any]:
        """Returns what happened to a row and what it waits for. `where` is its key, or the location of a cell of it.

        Raises NotFound for a row without cells.
        """
        return self._run(self._requests.explain(where, limit, read_from))

    def call(self, call: ApiCall, payload: Mapping[str, Any] | None = None, **named: Any) -> dict[str, Any]:
        """Returns the answer of a call of the contract. `named` are parts of its path, and of its query."""
        return self._run(self._requests.call(call, payload, named))

    def order_topology(
        self,
        order: str,
        cluster: str,
        node: str | None = None,
        *,
        without: Sequence[str] = (),
        fenced: bool = False,
        wait: float = 30.0,
        dry_run: bool = False,
    ) -> dict[str, Any]:
        """Orders a controller to `switch`, `promote`, `open` or `rejoin` a server, or to `acknowledge` a promotion.

        The `state` of its document is open when no controller settled it within `wait` seconds. Raises Conflict with
        the controller's sentence when it was refused.
        """
        asked = {"order": order, "cluster": cluster, "node": node, "without": list(without), "fenced": fenced}
        return self.call(services.TOPOLOGY_ORDER, {**asked, "wait": wait, "dry_run": dry_run})

    def erase(
        self,
        row_key: Key,
        column: str | None = None,
        ref_key: int | None = None,
        *,
        reason: str,
        dry_run: bool = False,
    ) -> dict[str, Any]:
        """Erases bodies for good: of a row, of a column of it, or of one cell. `erasure` of its document is the id.

        `matched` counts the cells. Raises NotFound where there are none.
        """
        asked = {"row_key": str(row_key), "column_name": column, "ref_key": ref_key}
        return self.call(erasures.ERASE, {**asked, "reason": reason, "dry_run": dry_run})

    def erasure(self, erasure: str, *, verify: bool = False) -> dict[str, Any]:
        """Returns what came of an erasure, place by place. Its `state` is running or complete.

        `verify`: the places are searched again.
        """
        return self.call(erasures.ERASURE, erasure=erasure, verify=verify or None)

    def document(self, path: str, **params: Any) -> dict[str, Any]:
        """Returns the document of /shards, /status, /conflicts, /indexes, /indexes/NAME or /topology."""
        return self._run(self._requests.get_json(path, params))

    def close(self) -> None:
        self._transport.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, flow: Flow[T]) -> T:
        try:
            request = next(flow)
            while True:
                request = flow.send(self._exchange(request))
        except StopIteration as done:  # perhaps before its first request
            result: T = done.value
            return result

    def _exchange(self, request: ClientRequest) -> ClientResponse:
        with tracing.calling(request.method, request.path) as header:
            return self._tried(request.with_headers(header) if header else request)

    def _tried(self, request: ClientRequest) -> ClientResponse:
        if request.delay_s:
            time.sleep(request.delay_s)
        with self._transport.place():
            attempts = Attempts(self._hosts, self._limits, time.monotonic())
            while True:
                attempt, sent = attempts.begin(time.monotonic(), request), self._credentials.authorization
                try:
                    response = self._transport.send(request, attempt.url, attempt.timeout_s)
                except Unavailable as error:
                    pause_s = attempts.broken(attempt, str(error), time.monotonic())
                else:
                    pause = attempts.answered(attempt, response, time.monotonic())
                    if pause is None and not self._credentials.renewed(response, sent):
                        return response
                    pause_s = pause or 0.0
                finally:
                    attempts.end(attempt)
                time.sleep(pause_s)


class CellIterator(Iterator[FoundCell]):
    """The cells that `Client.tail` returns. `next` waits for a cell. Threads can't share it."""

    def __init__(self, client: Client, tail: LogTail) -> None:
        self._client = client
        self._tail = tail

    @property
    def locations(self) -> Mapping[int, LogLocation]:
        """The position of each shard after the cells that were given. `client.tail(locations)` continues there."""
        return self._tail.locations

    def __next__(self) -> FoundCell:
        while (cell := self._tail.take()) is None:
            self._client._run(self._tail.fetch())
        return cell


class Index:
    """One index of a client's datastore. Raises Invalid for a name that no index can have."""

    def __init__(self, client: Client, name: str) -> None:
        self._client = client
        self._name = parse_index_name(name)

    def query(self, **terms: Any) -> EntriesPage:
        """Returns a page of entries by `field=value` (the shard field is required), `field__gte=value` and so on.

        Operators are ne, lt, lte, gt, gte, in, between, prefix and isnull. Options are order, desc, limit, cursor,
        fields, include, verify, explain, after, wait and read_from.
        """
        client = self._client
        return client._run(client._requests.query_index(self._name, terms))

    def entries(self, **terms: Any) -> EntryIterator:
        """Returns all entries of a query, page after page. `limit` is the size of a page."""
        return EntryIterator(self._client, EntryPages(self._client._requests, self._name, terms))

    def define(
        self, definition: Mapping[str, Any], *, change: bool = False, hold: bool = False, keep: str | None = None
    ) -> dict[str, Any]:
        """Creates the index, and returns its document. The same definition again changes nothing.

        `change`: an index with another definition gets a new version, which answers once it is complete, with `hold`
        once `switch` is called. The version before is kept for `keep`, such as "30m". Raises Conflict when another
        definition has its name and no change is asked for.
        """
        asked = {"change": change or None, "hold": hold or None, "keep": keep}
        return self._call(indexes.PUT, definition, **asked)

    def status(self) -> dict[str, Any]:
        """Returns the index's document: its state, why it failed, how far it is, what to do, and its versions."""
        return self._call(indexes.GET)

    def wait(self, timeout_s: float = 3600.0) -> dict[str, Any]:
        """Returns the index's document once it is active. Its change, if there is one, answers or waits for `switch`.

        Raises StateConflict if it is paused, has failed or is dropped meanwhile, NotFound if it was before, and
        NotReady after `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        document = self.status()
        while not is_ready(awaited_version(document)):
            if time.monotonic() > deadline:
                hint = awaited_version(document).get("what_to_do")
                raise NotReady(f"index {self._name} isn't active after {timeout_s:.0f} s", hint=hint)
            time.sleep(answers.INDEX_POLL_S)
            try:
                document = self.status()
            except NotFound as error:
                raise StateConflict(f"index {self._name} was dropped meanwhile", hint=error.hint) from error
        return document

    def problems(
        self, version: int | None = None, *, limit: int | None = None, cursor: str | None = None
    ) -> dict[str, Any]:
        """Returns a page of the values that don't fit the types of the index, and `count`, their exact number.

        `version` is as in `pause`.
        """
        path = f"/indexes/{self._name}/problems"
        return self._client.document(path, version=version, limit=limit, cursor=cursor)

    def verify(self, version: int | None = None, **options: Unpack[CheckOptions]) -> dict[str, Any]:
        """Orders that the index, or one version of it, is compared with its cells. `job` tells what came of it.

        Raises NotReady for a version that isn't complete.
        """
        return self._call(indexes.VERIFY, check_order(options), version=version)

    def repair(self, version: int | None = None, **options: Unpack[CheckOptions]) -> dict[str, Any]:
        """Orders the same as `verify`, and that entries on masters are brought to what the cells say."""
        return self._call(indexes.REPAIR, check_order(options), version=version)

    def job(self, job: str) -> dict[str, Any]:
        """Returns what came of a `verify` or a `repair` so far. Its `state` is running, done or dropped."""
        return self._client.call(programs.JOB, job=job)

    def switch(self, version: int | None = None, *, back: bool = False, keep: str | None = None) -> dict[str, Any]:
        """Lets another version answer: the newest one, with `back` the one before, or the one with a number.

        The version that answered until now is kept for `keep`, such as "30m".
        """
        return self._call(indexes.SWITCH, {"version": version, "back": back, "keep": keep})

    def drop(self, version: int | None = None, *, dry_run: bool = False) -> dict[str, Any]:
        """Drops the index in whatever state it is, or one version of it. Returns its document.

        The name of a dropped index may be used again at once. With `dry_run` nothing is dropped, and `would` of the
        document says what a drop would touch.
        """
        return self._call(indexes.DROP, version=version, dry_run=dry_run)

    def pause(self, version: int | None = None) -> dict[str, Any]:
        """Lets no indexer work on the index. If it was complete, it goes on to answer with what it has.

        Without `version` this means the change, if the index is being changed.
        """
        return self._call(indexes.PAUSE, version=version)

    def resume(self, version: int | None = None) -> dict[str, Any]:
        """Lets indexers work on the index again, also if it has failed. `version` is as in `pause`."""
        return self._call(indexes.RESUME, version=version)

    def throttle(
        self,
        cells_per_s: int | UnsetType | None = UNSET,
        version: int | None = None,
        **limits: Unpack[BuildLimits],
    ) -> dict[str, Any]:
        """Bounds what each indexer process may take of the servers for the index. What isn't given stays as it is.

        `cells_per_s`: how many cells a second it delivers, 0 and None: no bound. `version` is as in `pause`.
        """
        given = {} if cells_per_s is UNSET else {"cells_per_s": cells_per_s}
        return self._call(indexes.THROTTLE, {**given, **limits}, version=version)

    def _call(self, call: ApiCall, payload: Mapping[str, Any] | None = None, **query: Any) -> dict[str, Any]:
        return self._client.call(call, payload, name=self._name, **query)


class EntryIterator(Iterator[Entry]):
    """The entries that `Index.entries` returns."""

    def __init__(self, client: Client, pages: EntryPages) -> None:
        self._client = client
        self._pages = pages

    @property
    def page(self) -> EntriesPage | None:
        """The last page that was fetched, with its freshness."""
        return self._pages.page

    def __next__(self) -> Entry:
        while (entry := self._pages.take()) is None:
            if self._pages.at_end:
                raise StopIteration
            self._client._run(self._pages.fetch())
        return entry


class Program:
    """One trigger program, by its name. Each method returns the API's document (docs/parked.md).

    They raise NotFound for a program that never ran, Invalid, and StorageUnavailable.
    """

    def __init__(self, client: Client, name: str) -> None:
        self._client = client
        self._name = name

    def status(self) -> dict[str, Any]:
        return self._call(programs.GET)

    def parked(self, **filters: Any) -> dict[str, Any]:
        """Returns a page of parked cells. Filters are trigger, column, row_key, cause, since, limit and cursor."""
        return self._client.document(f"/triggers/{self._name}/parked", **filters)

    def doubts(self, **filters: Any) -> dict[str, Any]:
        """Returns a page of the parked cells with an effect of which nobody knows whether it happened."""
        return self.parked(doubt="true", **filters)

    def retry(self, **order: Any) -> dict[str, Any]:
        """Orders that parked cells are called again: `filter` or `ids`, and dry_run, rate (cells a second), reason."""
        return self._call(programs.RETRY, order)

    def discard(self, *, reason: str, **order: Any) -> dict[str, Any]:
        """Orders that parked cells are never called. What waits behind them is called, in order."""
        return self._call(programs.DISCARD, {**order, "reason": reason})

    def job(self, job: str) -> dict[str, Any]:
        """Returns what became of a retry or a discard."""
        return self._client.call(programs.JOB, job=job)

    def pause(self, shards: Sequence[int] = (), reason: str | None = None) -> dict[str, Any]:
        """Calls nothing of the program, or of these shards, until it is resumed."""
        return self._call(programs.PAUSE, {"shards": list(shards), "reason": reason})

    def resume(self, shards: Sequence[int] = ()) -> dict[str, Any]:
        """Lets what was paused, and what had stopped, run again."""
        return self._call(programs.RESUME, {"shards": list(shards)})

    def seek(self, to: str | Sequence[str], shards: Sequence[int] = (), *, dry_run: bool = False) -> dict[str, Any]:
        """Moves checkpoints to the beginning, the end, a time or locations."""
        where = to if isinstance(to, str) else list(to)
        return self._call(programs.SEEK, {"to": where, "shards": list(shards), "dry_run": dry_run})

    def _call(self, call: ApiCall, payload: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return self._client.call(call, payload, program=self._name)


SchemalessClient = Client
"""The name of the source texts."""
