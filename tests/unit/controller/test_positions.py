"""Positions of MariaDB name the last transaction of every server that wrote to a history."""

import pytest

from controller.server import lacks_mariadb, lacks_own_mariadb


@pytest.mark.parametrize(
    ("have", "wanted", "missing"),
    [
        ("1-100-47", "", ""),
        ("", "1-100-47", "1-100-47"),
        ("1-100-47,1-101-60", "1-100-47", ""),
        ("1-100-47", "1-100-47,1-101-60", "1-101-60"),
        ("1-100-47,1-101-60", "1-100-50", "1-100-50"),
        ("1-100-47,1-101-50", "1-100-50", "1-100-50"),
        ("1-101-60,1-100-70", "1-100-47,1-101-60", ""),
        ("1-100-47,1-100-50", "1-100-50", ""),
        ("1-101-60", "1-100-47", "1-100-47"),
        ("1-100-47,2-200-9", "1-100-46,2-200-10", "2-200-10"),
        ("1-100-100", "1-100-99", ""),
    ],
    ids=[
        "nothing is in everything",
        "and everything is missing in nothing",
        "a master before, without a tail",
        "a minion that lags",
        "a master before, whose tail was passed",
        "a tail as long as what the successor wrote",
        "masters that took turns",
        "what the log doesn't have yet, and replication has",
        "a copy doesn't know the writers before",
        "each domain by itself",
        "numbers are no text",
    ],
)
def test_what_a_position_lacks(have, wanted, missing):
    """A higher sequence number doesn't mean that a history contains another."""
    assert lacks_mariadb(have, wanted) == missing


@pytest.mark.parametrize(
    ("have", "wanted", "missing"),
    [
        ("1-100-47", "1-100-47,1-101-48", ""),
        ("1-100-47", "1-100-48,1-101-49", "1-100-48"),
        ("1-100-47", "1-101-48", ""),
        ("1-100-47", "1-101-48,2-101-3", ""),
        ("1-100-47", "1-10-48,1-101-47", "1-10-48"),
    ],
    ids=[
        "what somebody wrote to a minion",
        "beside what it received",
        "alone",
        "in another domain",
        "its id isn't the beginning of another",
    ],
)
def test_what_a_position_lacks_but_for_the_own_writes_of_one_server(have, wanted, missing):
    assert lacks_mariadb(have, wanted, "101") == missing


@pytest.mark.parametrize(
    ("have", "wanted", "missing"),
    [
        ("1-100-148", "1-100-310,1-101-649", "1-100-310"),
        ("1-100-310", "1-100-310,1-101-649", ""),
        ("1-100-148,1-101-647", "1-100-310,1-101-649", "1-100-310"),
        ("1-101-649", "1-100-310,1-101-649", ""),
        ("1-101-200", "1-100-310,1-101-649", "1-100-310"),
        ("", "1-100-310", "1-100-310"),
        ("", "1-101-310", ""),
        ("1-100-148,2-100-9", "1-100-148,2-100-10", "2-100-10"),
        ("1-100-148", "1-100-148,1-100-140", ""),
    ],
    ids=[
        "restored",
        "a master before",
        "restored, and followed since",
        "copied without its binary log",
        "copied so, and restored before the last of its own",
        "emptied",
        "one that never was master",
        "in one of two domains",
        "two parts of a position name one writer",
    ],
)
def test_what_a_server_lacks_of_its_own_writes(have, wanted, missing):
    assert lacks_own_mariadb(have, wanted, 100) == missing
