"""The tailer beside Debezium: one server, one million cells in 16 shards, the same rows for both.

Debezium reads them twice: as a snapshot of the tables, and as a backlog of the binary log that piled up while it was
down. The tailer knows no difference: its one rate stands beside both, and beside the raw limits of the same round.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bench.debezium import DEFAULTS, TUNED, Peer, Tuning, drain_rate, full_row_images
from bench.drain import backlog, raw_produce_rate, tail_rate
from bench.figures import Comparison, Values, at_least
from bench.filling import fill_ours
from bench.raw_limits import read_rate
from bench.scale import Scale
from bench.servers import BenchStack

RAW_FLOOR = at_least(0.4)
FLOORS = {DEFAULTS.name: at_least(2.5), TUNED.name: at_least(2.0)}


@dataclass(frozen=True, slots=True)
class _Rates:
    """The rates of one tuning, round by round."""

    tuning: Tuning
    snapshot: list[float]
    streamed: list[float]


def measure(stack: BenchStack, scale: Scale) -> list[Comparison]:
    full_row_images(stack)
    waiting = {tuning.name: _stand_at_the_beginning(stack, tuning) for tuning in (DEFAULTS, TUNED)}
    fill_ours(stack, backlog(scale.peer_cells, stack.datastore.shards))
    ours: list[float] = []
    raw: list[float] = []
    peers = [_Rates(tuning, [], []) for tuning in (DEFAULTS, TUNED)]
    for number in range(scale.drains):
        ours.append(tail_rate(stack, scale.peer_cells))
        raw.append(min(read_rate(stack), raw_produce_rate(stack, scale.peer_cells, f"raw-{number}")))
        for peer in peers:
            peer.snapshot.append(_snapshot_rate(stack, peer.tuning, number))
            peer.streamed.append(_streamed_rate(stack, waiting[peer.tuning.name]))
    what = "tailer beside the slower of PyMySQL reading and librdkafka producing"
    beside_raw = Comparison(what, "cells/s", Values(tuple(ours)), Values(tuple(raw)), RAW_FLOOR)
    return [beside_raw, *(row for peer in peers for row in _rows(ours, peer))]


def _stand_at_the_beginning(stack: BenchStack, tuning: Tuning) -> Peer:
    """A connector that was stopped in order when it had streamed the few cells that there were."""
    peer = Peer(stack, f"streamed-{tuning.name}", tuning)
    with peer.running():
        first = stack.cells() + 1
        fill_ours(stack, backlog(first, stack.datastore.shards))
        peer.wait_for(first)
    peer.save_position()
    return peer


def _snapshot_rate(stack: BenchStack, tuning: Tuning, number: int) -> float:
    peer = Peer(stack, f"snapshot-{tuning.name}-{number}", tuning)
    return drain_rate(peer, stack.cells())


def _streamed_rate(stack: BenchStack, peer: Peer) -> float:
    """Returns the rate from the saved position: each round streams the same cells."""
    peer.restore_position()
    return drain_rate(peer, stack.cells() - peer.saved_at)


def _rows(ours: list[float], peer: _Rates) -> Iterator[Comparison]:
    floor = FLOORS[peer.tuning.name]
    for what, theirs in (("snapshot", peer.snapshot), ("streamed backlog", peer.streamed)):
        title = f"tailer beside Debezium, {peer.tuning.name}: {what}"
        yield Comparison(title, "cells/s", Values(tuple(ours)), Values(tuple(theirs)), floor)
