"""What our own API refuses is never the fault of a cell: the program waits, says why, and uses no attempt up."""

import pytest

from schemaless import RetryPolicy, trigger
from schemaless.errors import (
    Forbidden,
    Invalid,
    Misdirected,
    NotReady,
    NotRepeatable,
    Overloaded,
    StorageUnavailable,
    TooManyRequests,
    Unauthenticated,
    Unavailable,
)
from tests.unit.schemaless.consume.parking_world import Process, Server

REFUSALS = [
    Unauthenticated, Forbidden, Misdirected, TooManyRequests, Unavailable, StorageUnavailable, Overloaded, NotReady,
    NotRepeatable,
]  # fmt: skip


class OwnError(Exception):
    pass


class Asking:
    """A function that asks our API, which refuses while `refusal` is set. `wrap` is how it passes that on."""

    def __init__(self, wrap, refusal):
        self.wrap = wrap
        self.refusal = refusal
        self.called = []

        @trigger(column="BASE", max_age=5.0, retry=RetryPolicy(attempts=2, delay=0.5, retry_on=(ZeroDivisionError,)))
        def ask(cell):
            self.called.append(cell.ref_key)
            if self.refusal is not None and not cell.body.get("is_free"):
                self._raise()

        self.function = ask

    def _raise(self):
        if self.wrap == "chained":
            try:
                raise self.refusal
            except Exception as error:
                raise OwnError("it can't") from error
        raise ExceptionGroup("together", [ValueError(), self.refusal]) if self.wrap == "grouped" else self.refusal


@pytest.mark.parametrize("wrap", ["plain", "chained", "grouped"])
@pytest.mark.parametrize("refusal", REFUSALS)
@pytest.mark.parametrize("rows", [1, 30])
async def test_the_program_waits_and_says_why(refusal, wrap, rows):
    """However few rows there are, and whatever the policy says. Everything continues by itself."""
    server, asking = Server(), Asking(wrap, refusal("this is why"))
    cells = [server.write(row) for row in range(rows)]
    process = Process(server, 1, [asking.function])
    await process.pass_by(60.0)
    assert "this is why" in process.handler.tripped
    assert refusal.__name__ in process.handler.tripped
    assert set(server.causes().values()) <= {"waiting"}
    assert len(asking.called) < rows + 150
    asking.refusal = None
    await process.pass_by(6.0)
    assert process.handler.tripped is None
    assert server.causes() == {}
    assert server.checkpoints[0].counts.called == len(cells)


@pytest.mark.parametrize("breaker", ["probe", "off", "stop"])
async def test_a_cell_that_is_refused_among_others_holds_its_own_row(breaker):
    """For instance one that asks for a datastore that the token may not read. It is tried every five seconds."""
    server, asking = Server(), Asking("plain", Forbidden("not there"))
    refused = server.write(0)
    for row in range(1, 30):
        server.write(row, body={"is_free": True})
    process = Process(server, 1, [asking.function], breaker=breaker)
    for row in range(30, 60):
        server.write(row, body={"is_free": True})
        await process.pass_by(1.0)
    assert server.causes() == {refused: "waiting"}
    assert server.parked[refused].attempts == 0
    assert 6 <= asking.called.count(refused) <= 40
    assert (server.checkpoints[0].counts.called, server.checkpoints[0].stopped) == (59, None)


async def test_a_request_that_is_wrong_is_the_cells_fault():
    """Sent again unchanged it fails again."""
    server, asking = Server(), Asking("plain", Invalid("body", "has no sense"))
    bad = server.write(0)
    await Process(server, 1, [asking.function]).pass_by(5.0)
    assert server.causes() == {bad: "error"}
