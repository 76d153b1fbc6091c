"""How long the benchmark takes: every count and time that a run is bounded by."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scale:
    """`rounds` of `round_s` each, for ours and for the comparator in turn.

    `warm_up_s` of paced load before latencies count: a broker that was just started compiles its hot paths meanwhile,
    on the cores that all share. `stack_warm_up_s` is the same for the whole stack under all the load that it takes.
    """

    rounds: int
    round_s: float
    rows_read: int
    cells_drained: int
    drains: int
    peer_cells: int
    latency_s: float
    warm_up_s: float
    stack_warm_up_s: float
    idle_s: float
    awakenings: int
    cells_called: int
    cells_parked: int
    cells_indexed: int
    cost_cells_few: int
    cost_cells_many: int
    flights_cleaned: int
    cells_backlogged: int
    client_puts: int


QUICK = Scale(
    rounds=3,
    round_s=1.0,
    rows_read=5_000,
    cells_drained=60_000,
    drains=2,
    peer_cells=60_000,
    latency_s=4.0,
    warm_up_s=3.0,
    stack_warm_up_s=5.0,
    idle_s=10.0,
    awakenings=5,
    cells_called=60_000,
    cells_parked=20_000,
    cells_indexed=50_000,
    cost_cells_few=20_000,
    cost_cells_many=100_000,
    flights_cleaned=30_000,
    cells_backlogged=200,
    client_puts=2_000,
)
FULL = Scale(
    rounds=5,
    round_s=4.0,
    rows_read=20_000,
    cells_drained=500_000,
    drains=3,
    peer_cells=1_000_000,
    latency_s=15.0,
    warm_up_s=90.0,
    stack_warm_up_s=45.0,
    idle_s=30.0,
    awakenings=15,
    cells_called=300_000,
    cells_parked=100_000,
    cells_indexed=300_000,
    cost_cells_few=100_000,
    cost_cells_many=5_000_000,
    flights_cleaned=336_776,
    cells_backlogged=1_600,
    client_puts=10_000,
)

SHARDS = 64
PEER_SHARDS = 16
MANY_SHARDS = 4096
PARTITIONS = 8
PARTITIONS_AT_500 = 2  # a transaction is of one partition: fewer partitions, more cells in each
