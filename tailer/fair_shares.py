"""Fair turns: how many cells of each shard one transaction takes, so that a huge shard never starves small ones."""

from __future__ import annotations

from collections.abc import Mapping


def shares(waiting: Mapping[int, int], cells_max: int) -> dict[int, int]:
    """Of `cells_max` cells, what each shard gets, in the order of `waiting` (cells that wait, by shard).

    Small shards get all they have; what they leave is divided evenly among the larger ones. Nobody gets 0.
    """
    left = max(cells_max, len(waiting))
    given: dict[int, int] = {}
    for position, shard in enumerate(sorted(waiting, key=waiting.__getitem__)):
        given[shard] = min(waiting[shard], left // (len(waiting) - position))
        left -= given[shard]
    return {shard: given[shard] for shard in waiting}
