"""What the errors of servers mean to us (I15)."""

import asyncmy.errors
import pymysql.err
import pytest

from schemaless.errors import (
    AccountRefused,
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
from schemaless.storage.operation import AGAIN_ON, runs_again
from schemaless.storage.translation import connecting_failed, refusals, translate
from schemaless.topology import Node

NODE = Node("b1", "b", "127.0.0.1", 3306, "schemaless", "a secret")
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


@pytest.mark.parametrize("number", [1203, 1129, 9999])
def test_a_server_that_lets_nobody_in_is_unreachable(number):
    """Whatever it says: a breaker keeps the next ones from trying."""
    error = connecting_failed(pymysql.err.OperationalError(number, "no"), NODE)
    assert type(error) is StorageUnavailable


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", [1045, 1130, 1251, 1524, 1698, 3118, 3955, 4150, 4151])
def test_a_refused_account_is_named_and_tried_once(kind, number):
    """No breaker, no server and no data is at fault. It is counted by number, and never shown with its password."""
    before = refusals.counts["b1", number]
    error = connecting_failed(kind(number, "Access denied"), NODE)
    assert type(error) is AccountRefused
    assert str(error) == "b1 refuses the account 'schemaless': Access denied"
    assert not runs_again(error, AGAIN_ON)
    assert refusals.counts["b1", number] - before == 1


@pytest.mark.parametrize("number", [1820, 1862])
def test_a_password_that_expired_is_named_as_one(number):
    error = connecting_failed(pymysql.err.OperationalError(number, "You must SET PASSWORD"), NODE)
    assert str(error) == "b1 refuses the account 'schemaless': its password has expired"
