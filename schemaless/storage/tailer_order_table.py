"""tailer_order: what an operator ordered of the tailers of a datastore. On every cluster: the latest row counts."""

from __future__ import annotations

import msgspec

from schemaless.storage.operation import Operation
from schemaless.storage.table import Table


class TailerCommand(msgspec.Struct, frozen=True):
    """`paused`: nothing more is published. `seeks`: how often an operator has moved progress: a tailer that opened its
    logs before reads it again. `changed_at` in microseconds since the epoch.
    """

    paused: bool
    seeks: int
    changed_at: int


NO_COMMAND = TailerCommand(paused=False, seeks=0, changed_at=0)


_TABLE = Table("schemaless.tailer_order", TailerCommand)


def put(datastore: str, command: TailerCommand) -> Operation[None]:
    """Writes what an operator ordered, unless a later order is stored."""
    yield _TABLE.newest(command, datastore=datastore)


def all_of() -> Operation[dict[str, TailerCommand]]:
    """Returns the orders by datastore."""
    return (yield from _TABLE.by("datastore"))
