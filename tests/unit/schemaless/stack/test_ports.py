"""Ports that are picked at random: two stacks that start at once never meet on one."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from schemaless.stack import plan

TAKES_ONE = """
from schemaless.stack import plan
plan.PORTS = range({first}, {first} + 2)
print(*plan.free_ports(1), flush=True)
input()
"""


@pytest.fixture
def two_ports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[range]:
    """The only ports that this test's processes may pick. No other stack picks them. Their reservations are apart."""
    first = next(port for port in range(19000, 20000, 2) if plan.is_free(port) and plan.is_free(port + 1))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(plan, "PORTS", range(first, first + 2))
    monkeypatch.setattr(plan, "_reserved", set())
    reservations = plan._reservations.__wrapped__()
    monkeypatch.setattr(plan, "_reservations", lambda: reservations)
    yield plan.PORTS
    os.close(reservations)


def test_a_port_that_another_process_was_given_is_not_given_again(two_ports: range) -> None:
    """It doesn't listen yet, so it looks free."""
    program = [sys.executable, "-c", TAKES_ONE.format(first=two_ports.start)]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        taken = int(other.stdout.readline())
        assert plan.is_free(taken)
        (given,) = plan.free_ports(1)
        assert {taken, given} == set(two_ports)
        with pytest.raises(plan.PortInUse):
            plan.free_ports(1)
        other.communicate("\n")
    assert plan.free_ports(1) == [taken], "a process that has ended gives its ports back"
