"""What `tailer status` prints: unknown isn't 0, and a cause is named once."""

from schemaless.cli.tailer import problem_lines, summary_line
from schemaless.location import Location
from schemaless.ops.tailers import ShardStatus, TailerStatus
from schemaless.storage.tailer_order_table import NO_COMMAND
from schemaless.topology import Datastore

AWAY = "the master of cluster a can't be reached"


def shard(number: int, head: Location | None, problem: str | None = None) -> ShardStatus:
    return ShardStatus(number, 0, Location(1, 1), head, 0.0, problem)


def test_shards_whose_master_is_away_are_not_counted_as_caught_up() -> None:
    """32 shards without a head are no 0 behind."""
    shards = [shard(n, Location(1, 1)) for n in range(32)] + [shard(n, None, AWAY) for n in range(32, 64)]
    line = summary_line(TailerStatus(Datastore("d", 64, 1, ("a",)), NO_COMMAND, {}, shards))
    assert "behind in 0 of 32 shards" in line
    assert line.endswith("Of 32 more the head isn't known")


def test_a_cause_is_named_once() -> None:
    """However many shards have it."""
    shards = [shard(n, None, AWAY) for n in range(32)] + [
        shard(40, None, "no progress"),
        shard(41, None, "no progress"),
    ]
    assert problem_lines(shards) == [f"32 shards, from 0 to 31: {AWAY}", "shards 40-41: no progress"]
