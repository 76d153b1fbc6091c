"""The problems of puts say what a caller has to know: whether the cell may exist, and what is safe to do."""

import json

import msgspec
import pytest

from api.http.content import JSON
from api.write.put import item_view, put_answer
from schemaless.errors import Busy, Corrupt, Overloaded, ShardsLocked, StorageUnavailable, Unavailable


@pytest.mark.parametrize("kind", [StorageUnavailable, ShardsLocked, Overloaded, Busy])
def test_a_put_without_an_outcome_may_still_appear_and_may_be_put_again(kind):
    """Alone and in a batch. Nobody knows whether the servers took it."""
    error = kind("a1: no answer within 1.25 s")
    answer = put_answer(error, JSON)
    alone, in_batch = json.loads(answer.body), item_view(error)["problem"]
    assert (answer.status, dict(answer.headers)[b"retry-after"]) == (503, b"1")
    assert alone == json.loads(msgspec.json.encode(in_batch))
    assert "put the same cell again" in alone["hint"]
    assert "may still appear" in alone["hint"]
    assert "a1" not in alone["detail"] + alone["hint"]


def test_a_put_that_was_turned_away_or_met_damage_says_nothing_of_that():
    """The first was given to no server, and the second fails again."""
    for error in (Unavailable("the write queue of cluster a is full"), Corrupt("a stored body can't be decoded")):
        assert "appear" not in item_view(error)["problem"]["hint"]
