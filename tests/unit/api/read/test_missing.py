"""Why a cell that isn't found may exist all the same: the hint is about the node that answered."""

import pytest

from api.read.reader import Served, missing
from schemaless.topology import Role


@pytest.mark.parametrize(
    ("role", "read_from", "said"),
    [
        (Role.MASTER, None, "nothing is stored there"),
        (Role.MASTER, Role.MASTER, "nothing is stored there"),
        (Role.MINION, None, "the master of cluster a can't be reached"),
        (Role.MINION, Role.MINION, "a minion may be behind"),
    ],
)
def test_the_hint_says_who_answered_and_what_may_be_missing(role, read_from, said):
    error = missing("there is no cell", Served(role, "a", 0.0), read_from)
    assert said in error.hint
    assert ("buffer" in error.hint) == (read_from is not Role.MINION)
    assert (b"schemaless-served-by", role.encode()) in error.headers
