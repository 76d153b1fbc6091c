"""A third storage cluster while flights load: it is added, and a third of the shards moves onto it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from schemaless.errors import StateConflict, Unavailable
from schemaless.ops.move_orders import arrivals, move_shards, plan_move
from schemaless.ops.moves import MoveStep
from schemaless.stack.growth import StackSite
from schemaless.stack.plan import require_plan
from schemaless.storage.pymysql_driver import SyncStorage
from schemaless.storage.shard_move_table import ShardMove
from schemaless.topology import Datastore, load_topology

CLUSTER = "c"
_TRIES_A_SHARD = 5
_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class Growth:
    """The cluster, how many shards were to move onto it and did, with how many cells and in how many seconds. Each was
    closed for a moment, and puts may have been tried again meanwhile.
    """

    cluster: str
    wanted: int
    moved: int
    cells: int
    seconds: float
    pauses_ms: Sequence[float]
    tried_again: int


class NewCluster:
    """Adds a cluster to an embedded stack, and moves every third shard of a datastore onto it."""

    def __init__(self, home: Path, datastore: Datastore, say: Callable[[str], None]) -> None:
        self._home = home
        self._datastore = datastore
        self._say = say

    @property
    def shards(self) -> list[int]:
        return list(range(0, self._datastore.shards - 2, 3))

    def grow(self, tried_again: Callable[[], int]) -> Growth:
        """Raises StateConflict or Unavailable when shards don't move, again and again."""
        self._say(StackSite(self._home, self._say).add_cluster(CLUSTER))
        began, before = time.monotonic(), tried_again()
        self._say(f"moving {len(self.shards)} shards to {CLUSTER}")
        with SyncStorage(load_topology(require_plan(self._home).topology_file)) as storage:
            left = _TRIES_A_SHARD * len(self.shards)
            while True:
                try:
                    self._move(storage)
                    break
                except (StateConflict, Unavailable):  # beside a busy load a switch may be taken back
                    left -= 1
                    if not left:
                        raise
                    time.sleep(_PAUSE_S)
            seconds = time.monotonic() - began
            again = tried_again() - before
            came = [one.move for one in arrivals(storage, self._datastore.name) if one.is_home]
        cells, pauses = sum(move.copied for move in came), [(move.pause_us or 0) / 1000 for move in came]
        return Growth(CLUSTER, len(self.shards), len(came), cells, seconds, pauses, again)

    def _move(self, storage: SyncStorage) -> None:
        def told(step: MoveStep, move: ShardMove) -> None:
            if step is MoveStep.UNDONE:
                self._say(f"shard {move.shard} stays on {move.source} for now: {move.told}")

        plan = plan_move(storage, self._datastore, self.shards, CLUSTER)
        move_shards(storage, self._datastore, plan, CLUSTER, told)
