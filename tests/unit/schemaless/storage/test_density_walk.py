"""What a walk over a server's logs finds, and what it costs (I3)."""

import re
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemaless.errors import LockTimeout
from schemaless.storage import shard_log
from schemaless.storage.operation import Result
from schemaless.storage.shard_log import DensityWalk

DATABASE = re.compile(r"FROM `?(\w+)_(\d{4})`?\.entity WHERE added_id > (\d+) AND added_id <= (\d+)")


class Server:
    """The heads of `trips`, and which added_ids of its shards are missing."""

    def __init__(self, heads, missing=()):
        self.heads, self.missing = list(heads), set(missing)
        self.moved, self.locked = set(), set()
        self.counted = []

    def look(self, walk):
        operation = walk.look()
        self.counted.append(0)
        try:
            script = next(operation)
            while True:
                script = operation.send([Result(self._answer(script))])
        except StopIteration as stop:
            return stop.value

    def walk(self, walk):
        """Looks until there is nothing more, as each period does. Returns the holes, each once."""
        found, goes_on = [], True
        while goes_on:
            holes, goes_on = self.look(walk)
            found += [(int(hole.database[-4:]), hole.added_id) for hole in holes]
        return sorted(set(found))

    def _answer(self, script):
        if "schemaless.shard_head" in script:
            after = int(re.search(r", (-?\d+)\) ORDER BY", script)[1])
            limit = int(script.rpartition("LIMIT ")[2])
            away = {n: "b" for n in self.moved}
            return [("trips", n, 1, head, away.get(n)) for n, head in enumerate(self.heads) if n > after][:limit]
        rows = []
        for _, shard, low, high in DATABASE.findall(script):
            if int(shard) in self.locked:
                raise LockTimeout("somebody holds it")
            there = [n for n in range(int(low) + 1, int(high) + 1) if (int(shard), n) not in self.missing]
            rows += [(n,) for n in there] if "COUNT" not in script else [(len(there),)]
            self.counted[-1] += int(high) - int(low)
        return rows


@given(st.data())
def test_every_shard_s_holes_are_found_and_nothing_else(data):
    """Of the two that a look may meet in a shard, above and below what is proven, each is named until it is filled."""
    heads = data.draw(st.lists(st.integers(0, 30), min_size=1, max_size=6))
    cells = [(shard, n + 1) for shard, head in enumerate(heads) for n in range(head)]
    missing = data.draw(st.sets(st.sampled_from(cells))) if cells else set()
    server, walk = Server(heads, missing), DensityWalk()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_log, "HEADS_AT_ONCE", data.draw(st.integers(1, 3)))
        patch.setattr(shard_log, "CELLS_AT_ONCE", data.draw(st.integers(1, 20)))
        for _ in range(len(missing) + 1):
            found = set(server.walk(walk))
            assert found <= server.missing
            assert {shard for shard, _ in found} == {shard for shard, _ in server.missing}
            server.missing -= found
        assert not server.missing


def test_what_is_proven_costs_no_more_and_what_comes_is_looked_at_first():
    """An old history of any length keeps no new hole hidden."""
    server, walk = Server([100_000, 5]), DensityWalk()
    server.look(walk)
    server.heads, server.missing = [100_010, 5], {(0, 100_007), (0, 4)}
    holes, goes_on = server.look(walk)
    assert ([hole.added_id for hole in holes], goes_on) == ([100_007], True)
    assert max(server.counted) <= 3 * shard_log.CELLS_AT_ONCE
    server.missing.clear()
    assert server.walk(walk) == []
    server.counted.clear()
    assert server.walk(walk) == []
    assert server.counted == [0]


def test_a_shard_that_was_restored_is_looked_at_again():
    """Its head fell, or it has another generation: other cells are there."""
    server, walk = Server([50]), DensityWalk()
    assert server.walk(walk) == []
    server.heads, server.missing = [40], {(0, 3)}
    assert server.walk(walk) == [(0, 3)]


def test_a_shard_that_came_back_is_looked_at_again():
    """Its table was dropped and copied anew meanwhile."""
    server, walk = Server([50, 50]), DensityWalk()
    assert server.walk(walk) == []
    server.moved = {0}
    assert server.walk(walk) == []
    server.moved, server.missing = set(), {(0, 3)}
    assert server.walk(walk) == [(0, 3)]


def test_a_hole_of_the_master_s_hides_no_other():
    """It is passed over. Where it is filled, nothing else is taken for a hole."""
    server, walk = Server([50]), DensityWalk()
    assert server.walk(walk) == []
    server.heads, server.missing = [90], {(0, 60), (0, 70)}
    assert server.walk(walk) == [(0, 60)]
    walk.pass_over(shard_log.hole("trips_0000", 60))
    assert server.walk(walk) == [(0, 70)]
    server.missing.clear()
    server.heads = [100]
    assert server.walk(walk) == []


def test_a_locked_shard_holds_up_no_other():
    """However long. Looks get smaller until they leave it out."""
    server, walk = Server([50] * 9), DensityWalk()
    server.locked, server.missing = {4}, {(shard, 7) for shard in range(9)}
    found = set()
    for _ in range(300):
        with suppress(LockTimeout):
            found |= {hole.database for hole in server.look(walk)[0]}
    assert found == {f"trips_000{shard}" for shard in range(9) if shard != 4}
