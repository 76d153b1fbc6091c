"""What the errors of servers mean to us (I15)."""

import asyncmy.errors
import pymysql.err
import pytest

from schemaless.errors import (
    Busy,
    DuplicateKey,
    LockTimeout,
    NodeRefuses,
    PacketTooLarge,
    RefusedForGood,
    StatementTimeout,
    StorageUnavailable,
    TableMissing,
)
from schemaless.storage.translation import connecting_failed, refusals, translate

KINDS = (pymysql.err.OperationalError, asyncmy.errors.OperationalError)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("number", "ours"),
    [
        (1062, DuplicateKey),
        (1213, Busy),
        (2013, StorageUnavailable),
        (1146, TableMissing),
        (1049, TableMissing),
        (1142, RefusedForGood),
        (1071, RefusedForGood),
        (1153, PacketTooLarge),
        (1205, LockTimeout),
        (1969, StatementTimeout),
        (3024, StatementTimeout),
        (1203, NodeRefuses),
        (1226, NodeRefuses),
        (3032, NodeRefuses),
        (9999, NodeRefuses),
    ],
)
def test_each_number_has_one_meaning_and_an_unknown_one_means_that_this_node_cannot(kind, number, ours):
    """I15: the caller did nothing wrong, and another node may do it."""
    before = refusals.counts["b1", number]
    error = translate(kind(number, "what the server says"), "b1")
    assert type(error) is ours
    assert error.retryable or ours is DuplicateKey
    assert refusals.counts["b1", number] - before == issubclass(ours, NodeRefuses)


@pytest.mark.parametrize("number", [1045, 1203, 1129, 9999])
def test_a_server_that_lets_nobody_in_is_unreachable(number):
    """Whatever it says: a breaker keeps the next ones from trying."""
    error = connecting_failed(pymysql.err.OperationalError(number, "no"), "b1")
    assert type(error) is StorageUnavailable
