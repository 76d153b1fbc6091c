"""Switches of shards that nobody ends: their mover is gone, or stands still while the shard is closed.

The mover's command would end such a switch when it is run again. A controller does it before, and takes the same locks,
so no two processes do it at once. Only the command continues the copy. Nothing is kept here that a controller needs
after its death: the placement, the row of the move and the locks are on the servers.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import structlog

from schemaless.errors import SchemalessError
from schemaless.ops.moves import LOCK, Mover, ShardMover
from schemaless.storage import schema
from schemaless.storage.operation import query
from schemaless.storage.placement_table import Placements
from schemaless.storage.pymysql_driver import SyncNode, SyncStorage
from schemaless.storage.shard_move_table import MoveState, home_head, mover_session, of_shard, unchanged_s
from schemaless.topology import Placement, Topology

log = structlog.get_logger()

AGAIN_S = 1.0
STILL_S = 5
"""The mover of a closed shard stands still if the row wasn't changed for so long: a switch takes a second at most."""
WAITS_STILL_S = 20
"""The same once the target is open: a mover that waits for its voters changes the row every 5 s, and after a look at
all servers, which one that hangs holds up by 10 s.
"""
STORAGE_TIMEOUT_S = 5.0


def announced(placements: Placements) -> list[Placement]:
    """Returns the switches that were announced, and aren't ended yet as far as this process knows."""
    return [one for shards in placements.values() for one in shards.values() if one.coming is not None]


class SwitchEnder:
    """Ends switches, as the services' account. `step` makes one pass."""

    def __init__(self) -> None:
        self._seen: dict[Placement, str] = {}
        """By switch why it couldn't be ended, '' if that isn't known."""

    def step(self, topology: Topology, switches: Iterable[Placement]) -> None:
        """Ends what nobody else ends of the switches that the last pass saw, too: most take less than two passes."""
        before, self._seen = self._seen, {}
        for switch in switches:
            self._seen[switch] = before.get(switch, "")
            if switch in before:
                try:
                    _end_if_left(topology, switch)
                except SchemalessError as error:
                    if str(error) != before[switch]:
                        log.warning("a switch can't be ended", switch=msgspec.to_builtins(switch), why=str(error))
                    self._seen[switch] = str(error)


def _end_if_left(topology: Topology, switch: Placement) -> None:
    clusters = (switch.home, str(switch.coming))
    with SyncStorage(topology, timeout_s=STORAGE_TIMEOUT_S) as storage:
        source, target = (storage.master(cluster) for cluster in clusters)
        locked = {node: session for node in (source, target) if (session := node.run(mover_session, LOCK))}
        # Read after the locks: a mover that ended before has published where the shard lives.
        datastore = source.run(schema.datastores)[switch.datastore]
        known = datastore.moves.get(switch.shard)
        if known is not None and known.number > switch.number:
            return
        if locked and not _stands_still(source, target, switch):
            return
        for node, session in locked.items():
            log.warning("a mover stands still, and its session is ended", node=node.node.name, session=session)
            node.run(query, f"KILL {session}")
        with Mover(storage, clusters) as mover:
            one = ShardMover(mover, storage.live(datastore), switch.shard, *clusters)
            one.begin()
            log.info("a switch is ended", datastore=datastore.name, shard=switch.shard, state=one.move.state)


def _stands_still(source: SyncNode, target: SyncNode, switch: Placement) -> bool:
    """Returns whether a shard is closed, and nobody does anything about it for longer than its mover takes.

    The lock may be another one's, who moves another shard since. That one's command is run again.
    """
    shard = switch.datastore, switch.shard
    here, move = source.run(home_head, *shard), target.run(of_shard, *shard)
    if here is None or here.moved_to != switch.coming or move is None:
        return False
    return target.run(unchanged_s, move) >= (WAITS_STILL_S if move.state is MoveState.OPEN else STILL_S)
