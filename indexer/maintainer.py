"""The maintainer is one index as a consumer: it turns cells into versioned index writes, by cluster (I11)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain

import msgspec

from indexer.throttle import Throttle
from schemaless.cell import RowKey, StoredCell
from schemaless.consume.ports import Effect, Outcome, Run, Script, StatelessHandler
from schemaless.errors import Fenced, StorageUnavailable
from schemaless.index.definition import IndexDefinition
from schemaless.index.inspection import ExpectedEntries
from schemaless.index.transition import (
    IndexWrite,
    ProblemWrite,
    Row,
    Transitions,
    erasing_writes,
    index_writes,
    superseding_problems,
    superseding_writes,
    walked_writes,
)
from schemaless.location import GenerationStart, Location, kept_until, visible_starts
from schemaless.names import ERASE_COLUMN
from schemaless.runtime.batching import all_or_first_error, chunks
from schemaless.sharding import shard_of
from schemaless.storage import (
    checkpoint_table,
    entity_table,
    index_check_table,
    index_definition_table,
    index_problem_table,
    index_table,
    index_write_table,
    shard_head,
)
from schemaless.storage.asyncmy_driver import AsyncNode, AsyncStorage
from schemaless.storage.checkpoint_table import Checkpoint
from schemaless.storage.failover import all_masters
from schemaless.storage.index_problem_table import IndexVersion
from schemaless.storage.operation import query
from schemaless.topology import Datastore

Rows = Mapping[RowKey, Row]

Write = Callable[[str, Script], Awaitable[None]]
"""Runs a script on a cluster in one transaction. Raises Fenced, and nothing of it stays, for a process that is late."""

EFFECT_BYTES_MAX = 8 << 20
"""The most bytes of SQL that one effect has for a cluster: half of MariaDB's default for what a server takes."""

_SCANNED_AT_ONCE = 8  # index shards in one statement of `supersede`
_PROBLEMS_AT_ONCE = 256  # rows in one statement of `supersede`, some megabytes at most


class WalkedPart(msgspec.Struct, frozen=True):
    """The scripts that write consecutive rows, by cluster. `keys`: of these rows. `last`: the last row key."""

    scripts: Mapping[str, Script]
    keys: int
    last: RowKey
    more: bool


class Maintainer(StatelessHandler):
    foreign_code = None
    together = True
    """Entries of several shards go to the same tables: one transaction for each cluster takes them all."""

    record_within_s = 0.0
    """A checkpoint moves in the transaction of its entries."""

    def __init__(
        self,
        storage: AsyncStorage,
        datastore: Datastore,
        definition: IndexDefinition,
        throttle: Throttle | None = None,
        *,
        effect_bytes_max: int = EFFECT_BYTES_MAX,
        examined_rows_max: int = index_table.EXAMINED_ROWS_MAX,
    ) -> None:
        self.throttle = throttle or Throttle()
        self._storage = storage
        self._datastore = datastore
        self._placed = definition.placed(datastore)
        self._cells = ExpectedEntries(storage, datastore, definition)
        self._definition = definition
        self._read_for = definition.columns | {ERASE_COLUMN}
        self.version = IndexVersion(datastore.name, definition.name, definition.number)
        self.is_kept = False
        """Whether another version answers, and what is written to this one is counted."""
        self._effect_bytes_max = effect_bytes_max
        self._examined_rows_max = examined_rows_max

    async def handle(self, runs: Sequence[Run]) -> Effect:
        """Evaluates the index before and after each event, on the log alone. Raises StorageUnavailable.

        It finishes as many cells as the throttle allows and as fit the bounds of what it reads and writes.
        """
        given = [run.before_erasure for run in runs]
        allowed = self.throttle.take(sum([len(run.cells) for run in given]))
        runs = _first_cells(given, allowed)
        before, unread = await self._rows_before(runs)
        room = self._room()
        outcomes, writes, problems = [], list[IndexWrite](), list[ProblemWrite]()
        for whole, run in zip(given, runs, strict=True):
            missing = unread.get(run.shard, frozenset())
            readable = next(
                (
                    n
                    for n, cell in enumerate(run.cells)
                    if cell.row_key in missing and cell.column_name in self._read_for
                ),
                len(run.cells),
            )
            cells, rows = run.cells[:readable], before[run.shard]
            if cells and self._loses(run):
                changed = await self._erase(cells[0], rows.get(cells[0].row_key, {}), room)
            else:
                changed = index_writes(self._definition, self._datastore.shards, rows, cells, room.take)
            writes += changed.writes
            problems += changed.problems
            held_back = len(run.cells) < len(whole.cells) and changed.finished == len(run.cells)
            outcomes.append(Outcome(changed.finished, self.throttle.wait_s if held_back else 0.0))
        scripts = self._scripts(writes, problems)
        if self.is_kept:
            for cluster, here in self._placed.by_home(writes, lambda write: write.shard).items():
                scripts[cluster] += f";{index_write_table.count(self.version, runs[0].shard, len(here))}"
        return Effect(outcomes, scripts)

    def _loses(self, run: Run) -> bool:
        """Whether a run is the entry of an erasure of cells that the index is made of."""
        return (erasing := run.erasing) is not None and not self._definition.columns.isdisjoint(erasing.cells)

    async def _erase(self, entry: StoredCell, row: Row, room: _Room) -> Transitions:
        """Returns what the entry of an erasure changes. No list of faults keeps values of its row, either (I19).

        Whoever moved a checkpoint before has committed: so what index tables have of the row is found, or nothing of
        this stays.
        """
        shards = self._placed.by_home(range(self._datastore.shards), lambda shard: shard)
        found = await all_or_first_error(
            self._storage.master(cluster).run(
                index_table.of_rows, self._datastore, self._definition, {n: [entry.row_key] for n in some}
            )
            for cluster, here in shards.items()
            for some in chunks(here, count_max=index_table.SHARDS_AT_ONCE)
        )
        await all_masters(
            self._storage, self._datastore.clusters, index_check_table.forget_faults, self.version, entry.row_key
        )
        writes, problem = erasing_writes(
            self._definition, self._datastore.shards, entry, row, chain.from_iterable(found)
        )
        return Transitions(writes, 1, [problem]) if room.take(writes, problem) else Transitions([], 0)

    async def supersede(self, shard: int, starts_at: int, generation: int) -> Effect:
        """Takes back what cells of a shard wrote that a generation superseded, at or above `starts_at` (I13).

        The checkpoint must be read before, on every cluster, and move back by compare-and-set together with the
        scripts. It is repeatable. Where it takes several transactions, only the last is returned. The early ones hold
        the checkpoint as it is now. A cluster that is past the new generation's start has nothing to take back.
        Raises Fenced when another process moved a checkpoint, and StorageUnavailable.
        """
        checkpoints = await self._checkpoints(shard)
        known = await self.generations(shard, generation)
        clusters = [
            cluster
            for cluster, checkpoint in checkpoints.items()
            if not starts_at <= checkpoint.location.added_id == kept_until(checkpoint.location, known)
        ]

        async def write(cluster: str, script: Script) -> None:
            master = self._storage.master(cluster)
            if not await master.run(checkpoint_table.write_at, self._datastore.name, checkpoints[cluster], script):
                raise Fenced(f"another process moved the checkpoint of shard {shard}")

        last = await self.take_back(shard, starts_at, known, clusters, write)
        await self._walk_again(shard, starts_at - 1, clusters, write)
        # What no tombstone tells of any more was walked. If more of them went meanwhile, it must be walked again.
        refusal = index_table.refusal(self.version, shard, starts_at - 1)
        return Effect([], {cluster: ";".join(filter(None, [refusal, last[cluster]])) for cluster in clusters})

    async def generations(self, shard: int, generation: int) -> Sequence[GenerationStart]:
        """Returns the generations of a shard, once this one is among them. Raises StorageUnavailable."""
        known = await self._cells.read({shard: 0}, shard_head.generations, self._datastore.name, shard)
        if all(start.generation < generation for start in known):
            raise StorageUnavailable(f"generation {generation} of shard {shard} is not known on its master yet")
        return known

    async def take_back(
        self, shard: int, starts_at: int, known: Sequence[GenerationStart], clusters: Collection[str], write: Write
    ) -> dict[str, Script]:
        """Rewrites on some clusters what superseded cells of a shard wrote, at or above `starts_at`.

        All but the last script of each cluster, which it returns. `known` are the shard's generations. `write` must
        fail once another process has taken the shard further. Raises what it raises, and StorageUnavailable.
        """
        place = self._datastore.name, self._definition.name, self._definition.number, shard, starts_at - 1
        await all_masters(self._storage, self._storage.topology.clusters, index_definition_table.lower_build, *place)
        starts = [start for start in visible_starts(known) if start.starts_at >= starts_at]
        if not starts:
            return dict.fromkeys(clusters, "")
        await self._supersede_problems(self._storage.master(self._placed.home(shard)), shard, starts)
        last = await all_or_first_error(self._supersede_on(cluster, shard, starts, write) for cluster in clusters)
        return dict(zip(clusters, last, strict=True))

    async def _checkpoints(self, shard: int) -> dict[str, Checkpoint]:
        """Returns the checkpoint of a shard on each cluster. Raises Fenced where there is none, StorageUnavailable."""
        name, consumer = self._datastore.name, self._definition.consumer
        answers = await all_masters(
            self._storage, self._placed.clusters, checkpoint_table.of_consumer, name, consumer, [shard]
        )
        if not all(answers.values()):
            raise Fenced(f"another process began shard {shard} anew")
        return {cluster: found[0] for cluster, found in answers.items()}

    async def _walk_again(self, shard: int, until: int, clusters: Collection[str], write: Write) -> None:
        """Writes the rows of a shard up to an added_id, if the walk that built the index went further.

        Or if tombstones behind it are gone. A lost cell may have been the last to leave a shard: then no version there
        tells of it.
        """
        version, consumer = self.version, self._definition.consumer
        found = await all_masters(self._storage, clusters, index_definition_table.walks, version, consumer, [shard])
        forgotten = await all_masters(self._storage, clusters, index_table.forgotten, version, shard)
        walks = [walk[shard] for walk in found.values() if shard in walk]
        if all(walk.until <= until for walk in walks) and max(forgotten.values(), default=0) <= until:
            return
        after, more = RowKey(b""), True
        while more:
            part = await self.walk(shard, until, after)
            await all_or_first_error(
                write(cluster, script) for cluster, script in part.scripts.items() if cluster in clusters
            )
            after, more = part.last, part.more
        lowered = f"{index_definition_table.lowering_walk(self.version, shard, until)};" + index_table.remembering(
            self.version, shard, until
        )
        await all_or_first_error(write(cluster, lowered) for cluster in clusters)

    async def walk(
        self, shard: int, until: int, after: RowKey, columns_max: int = entity_table.COLUMNS_AT_ONCE
    ) -> WalkedPart:
        """Evaluates the next rows of a shard behind a row key, as the log makes them up to an added_id.

        At least one, as many as fit the bounds of what it reads and writes. Raises StorageUnavailable.
        """
        columns = self._definition.columns
        page = await self._cells.read(
            {shard: until}, entity_table.walk, self._datastore, shard, columns, until, after, columns_max
        )
        room = self._room()
        writes, problems, keys = list[IndexWrite](), list[ProblemWrite](), 0
        for row in page.rows:
            if row.newest:
                own, problem = walked_writes(self._definition, self._datastore.shards, shard, row.newest)
                if not room.take(own, problem):
                    return WalkedPart(self._scripts(writes, problems), keys, after, more=True)
                writes += own
                problems += [] if problem is None else [problem]
            after, keys = row.row_key, keys + row.keys
        return WalkedPart(self._scripts(writes, problems), keys, after, page.more)

    async def _supersede_problems(self, home: AsyncNode, shard: int, starts: Sequence[GenerationStart]) -> None:
        """Judges the rows again whose problems superseded cells had written. It may be repeated, and be late."""
        after = RowKey(b"")
        while starts:
            page = await home.run(
                index_problem_table.superseded, self.version, shard, starts, after, self._examined_rows_max
            )
            found: dict[GenerationStart, list[RowKey]] = {}
            for row_key, version in page:
                found.setdefault(_superseded_by(version, starts), []).append(row_key)
            for start, row_keys in found.items():
                async for read, rows in self._rows_at(shard, start, row_keys):
                    problems = superseding_problems(self._definition, self._datastore.shards, start, shard, rows, read)
                    for some in chunks(problems, count_max=_PROBLEMS_AT_ONCE):
                        await home.run(query, index_problem_table.upserts(self.version, some))
            if len(page) < self._examined_rows_max:
                return
            after = page[-1][0]

    async def _supersede_on(self, cluster: str, shard: int, starts: Sequence[GenerationStart], write: Write) -> Script:
        """Rewrites the superseded entries of one cluster's index shards, but for the last script, which it returns."""
        master = self._storage.master(cluster)
        after = {n: index_table.BEFORE_ALL for n in range(self._datastore.shards) if self._placed.home(n) == cluster}
        pending: Script = ""
        while after:
            asked = dict(list(after.items())[:_SCANNED_AT_ONCE])
            pages = await master.run(
                index_table.superseded, self._datastore, self._definition, asked, starts, self._examined_rows_max
            )
            found: dict[GenerationStart, list[tuple[int, RowKey, int]]] = {}
            for index_shard, page in pages.items():
                for (row_key, element), version in page.rows:
                    if shard_of(row_key, self._datastore.shards) == shard:
                        places = found.setdefault(_superseded_by(version, starts), [])
                        places.append((index_shard, row_key, element))
                if page.last is None:
                    del after[index_shard]
                else:
                    after[index_shard] = page.last
            for start, places in found.items():
                async for script in self._superseding(shard, start, places):
                    if pending and len(pending) + len(script) > self._effect_bytes_max:
                        await write(cluster, pending)
                        pending = ""
                    pending = f"{pending};{script}" if pending else script
        return pending

    async def _superseding(
        self, shard: int, start: GenerationStart, places: Sequence[tuple[int, RowKey, int]]
    ) -> AsyncIterator[Script]:
        """Yields the scripts that rewrite (index shard, row key, element)s, each within the bound of an effect."""
        of_row: dict[RowKey, list[tuple[int, RowKey, int]]] = {}
        for place in places:
            of_row.setdefault(place[1], []).append(place)
        async for row_keys, rows in self._rows_at(shard, start, list(of_row)):
            read = sorted(place for row_key in row_keys for place in of_row[row_key])
            room, part = self._room(), list[IndexWrite]()
            for write in superseding_writes(self._definition, self._datastore.shards, start, rows, read):
                if not room.take([write]):
                    yield index_table.upserts(self._datastore, self._definition, part)
                    room, part = self._room(), []
                    room.take([write])
                part.append(write)
            if part:
                yield index_table.upserts(self._datastore, self._definition, part)

    async def _rows_at(
        self, shard: int, start: GenerationStart, row_keys: Sequence[RowKey]
    ) -> AsyncIterator[tuple[Sequence[RowKey], Rows]]:
        """Yields row keys and their rows, as the log makes them just before a generation starts, in bounded parts."""
        columns = self._definition.columns
        while row_keys:
            wanted = {shard: (start.starts_at - 1, row_keys)}
            page = await self._cells.read(
                {shard: start.starts_at - 1}, entity_table.newest_until, self._datastore, wanted, columns
            )
            unread = page.unread.get(shard, ())
            left = set(unread)
            yield [row_key for row_key in row_keys if row_key not in left], _rows(page.cells).get(shard, {})
            row_keys = unread

    async def _rows_before(self, runs: Sequence[Run]) -> tuple[dict[int, Rows], dict[int, frozenset[RowKey]]]:
        """Returns by shard the rows of the run's cells, as the log makes them just before its first cell.

        And the rows that were not read, because their bodies are too many bytes. The first that is needed was read.
        """
        columns = self._definition.columns
        wanted: dict[int, tuple[int, Sequence[RowKey]]] = {}
        for run in runs:
            row_keys = list(dict.fromkeys(cell.row_key for cell in run.cells if cell.column_name in self._read_for))
            until = run.cells[0].added_id if self._loses(run) else run.after.added_id
            if row_keys and until:
                wanted[run.shard] = (until, row_keys)
        pages = await all_or_first_error(
            self._cells.read(
                {n: wanted[n][0] for n in shards},
                entity_table.newest_until,
                self._datastore,
                {n: wanted[n] for n in shards},
                columns,
            )
            for shards in self._datastore.by_home(wanted, lambda shard: shard).values()
        )
        before: dict[int, Rows] = {run.shard: {} for run in runs}
        before.update(_rows(cell for page in pages for cell in page.cells))
        return before, {shard: frozenset(keys) for page in pages for shard, keys in page.unread.items()}

    def _scripts(self, writes: Sequence[IndexWrite], problems: Sequence[ProblemWrite]) -> dict[str, Script]:
        scripts = {
            cluster: index_table.upserts(self._datastore, self._definition, sorted(here, key=_lock_order))
            for cluster, here in self._placed.by_home(writes, lambda write: write.shard).items()
        }
        for cluster, found in self._placed.by_home(problems, lambda write: write.shard).items():
            script = index_problem_table.upserts(
                self.version, sorted(found, key=lambda write: (write.shard, write.row_key))
            )
            scripts[cluster] = f"{scripts[cluster]};{script}" if cluster in scripts else script
        return scripts

    def _room(self) -> _Room:
        return _Room(self._placed, self._definition, self._effect_bytes_max)


class _Room:
    """The bytes of SQL that are left of an effect, by cluster. The first writes are taken whatever their size."""

    def __init__(self, datastore: Datastore, definition: IndexDefinition, bytes_max: int) -> None:
        self._datastore = datastore
        self._definition = definition
        self._left = dict.fromkeys(datastore.clusters, bytes_max)
        self._shards = set[int]()
        self._is_used = False

    def take(self, writes: Sequence[IndexWrite], problem: ProblemWrite | None = None) -> bool:
        """Takes the writes of one cell, all or none. Returns whether they fit."""
        taken: dict[str, int] = {}
        for write in writes:
            home, is_first = self._datastore.home(write.shard), write.shard not in self._shards
            taken[home] = taken.get(home, 0) + index_table.sql_bytes_max(self._definition, write, is_first)
        if problem is not None:
            home = self._datastore.home(problem.shard)
            taken[home] = taken.get(home, 0) + index_problem_table.sql_bytes_max(problem)
        if self._is_used:
            for home, size in taken.items():
                if size > self._left[home]:
                    return False
        for home, size in taken.items():
            self._left[home] -= size
            self._is_used = True
        for write in writes:
            self._shards.add(write.shard)
        return True


def _first_cells(runs: Sequence[Run], count: int) -> Sequence[Run]:
    """Returns the runs with `count` of their cells in fair shares. Some may be left without any."""
    cut = []
    for others, run in zip(range(len(runs), 0, -1), runs, strict=True):
        share = min(len(run.cells), -(-count // others))
        cut.append(run if share == len(run.cells) else Run(run.shard, run.after, run.cells[:share]))
        count -= share
    return cut


def _rows(cells: Iterable[StoredCell]) -> Mapping[int, Rows]:
    """Returns cells by shard, row and column."""
    found: dict[int, dict[RowKey, dict[str, StoredCell]]] = {}
    for cell in cells:
        found.setdefault(cell.shard, {}).setdefault(cell.row_key, {})[cell.column_name] = cell
    return found


def _superseded_by(version: Location, starts: Sequence[GenerationStart]) -> GenerationStart:
    """Returns the latest generation that supersedes a version. There is one."""
    return max(
        (start for start in starts if version.generation < start.generation and version.added_id >= start.starts_at),
        key=lambda start: start.generation,
    )


def _lock_order(write: IndexWrite) -> tuple[int, RowKey, int]:
    """Concurrent transactions lock rows in the same order, so they wait for one another instead of failing."""
    return write.shard, write.row_key, write.element
