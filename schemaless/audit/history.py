"""Positions that others recorded, judged by the audit itself: by generation (I13), and by the cell at them (I16).

Checkpoints and progress records are positions. A later generation supersedes a position by number. A restored master
does it without changing any number, so the digest of the cell counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from schemaless.audit.report import FindingKind, Findings
from schemaless.location import GenerationStart, Location
from schemaless.position import Position
from schemaless.storage import shard_log
from schemaless.storage.pymysql_driver import SyncStorage
from schemaless.topology import Datastore

QUESTION_POSITIONS_MAX = 500
"""How many positions one question to a server compares (I14)."""

Starts = Mapping[int, Sequence[GenerationStart]]
"""The starts of each shard's generations."""


def finished_until(location: Location, starts: Iterable[GenerationStart]) -> int:
    """Returns up to which added_id of the present history a location counts (I13).

    What a later generation superseded isn't finished, so the location counts up to before the lowest later start.
    """
    later = [start.starts_at - 1 for start in starts if start.generation > location.generation]
    return min([location.added_id, *later])


def audit_positions(
    storage: SyncStorage,
    datastore: Datastore,
    whose: str,
    positions: Iterable[Position],
    starts: Starts,
    findings: Findings,
) -> set[int]:
    """Compares the cell that each position stands on with MySQL's, and returns the shards where it is another one.

    There is at most one position of a shard. A superseded position stands on a cell that is rightly gone, so it is not
    compared. A position without a digest is compared by its number only: MySQL must have a cell there.
    """
    present = [
        position
        for position in positions
        if finished_until(position.location, starts[position.shard]) == position.added_id
    ]
    wrong = set()
    for position, found in _digests(storage, datastore, present):
        if found is None:
            detail = f"{whose} is at {position.location}, where MySQL has no cell"
        elif position.digest is not None and found != position.digest:
            detail = f"{whose} is at {position.location} of another history: MySQL has another cell there"
        else:
            continue
        findings.add(FindingKind.OTHER_HISTORY, position.shard, detail)
        wrong.add(position.shard)
    return wrong


def _digests(
    storage: SyncStorage, datastore: Datastore, positions: Iterable[Position]
) -> Iterator[tuple[Position, int | None]]:
    """Yields each position with the digest of the cell that the shard's master has there."""
    for cluster, mine in datastore.by_home(positions, lambda position: position.shard).items():
        for first in range(0, len(mine), QUESTION_POSITIONS_MAX):
            some = mine[first : first + QUESTION_POSITIONS_MAX]
            wanted = {position.shard: position.added_id for position in some}
            found = storage.master(cluster).run(shard_log.digests, datastore, wanted)
            yield from ((position, found[position.shard]) for position in some)
