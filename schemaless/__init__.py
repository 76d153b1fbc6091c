"""Schemaless: an append-only store of immutable JSON cells whose change log is on Kafka.

Public names are loaded when they are first used: importing the core loads neither httpx nor Faust.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from schemaless.trigger import Park, Retry, Skip, Stop, trigger  # at once: its module has the function's name

if TYPE_CHECKING:
    from schemaless.bus.faust_app import faust_app
    from schemaless.bus.faust_cells import cells_topic, each_cell
    from schemaless.cell import StoredCell
    from schemaless.client.async_client import AsyncClient
    from schemaless.client.attempts import Limits
    from schemaless.client.client import Client
    from schemaless.client.client import Client as SchemalessClient
    from schemaless.client.put_batch import NewCell
    from schemaless.codec import decode_body
    from schemaless.errors import SchemalessError
    from schemaless.location import Location
    from schemaless.record import Announcement, ForeignRecord, decode_record
    from schemaless.subscriber.position import Batch, GenerationChange, Position
    from schemaless.subscriber.subscriber import Subscriber

__all__ = [
    "Announcement",
    "AsyncClient",
    "Batch",
    "Client",
    "ForeignRecord",
    "GenerationChange",
    "Limits",
    "Location",
    "NewCell",
    "Park",
    "Position",
    "Retry",
    "SchemalessClient",
    "SchemalessError",
    "Skip",
    "Stop",
    "StoredCell",
    "Subscriber",
    "cells_topic",
    "decode_body",
    "decode_record",
    "each_cell",
    "faust_app",
    "trigger",
]

_HOMES = {
    "Announcement": ("schemaless.record", "Announcement"),
    "AsyncClient": ("schemaless.client.async_client", "AsyncClient"),
    "Batch": ("schemaless.subscriber.position", "Batch"),
    "Client": ("schemaless.client.client", "Client"),
    "ForeignRecord": ("schemaless.record", "ForeignRecord"),
    "GenerationChange": ("schemaless.subscriber.position", "GenerationChange"),
    "Limits": ("schemaless.client.attempts", "Limits"),
    "Location": ("schemaless.location", "Location"),
    "NewCell": ("schemaless.client.put_batch", "NewCell"),
    "Position": ("schemaless.subscriber.position", "Position"),
    "SchemalessClient": ("schemaless.client.client", "Client"),
    "SchemalessError": ("schemaless.errors", "SchemalessError"),
    "StoredCell": ("schemaless.cell", "StoredCell"),
    "Subscriber": ("schemaless.subscriber.subscriber", "Subscriber"),
    "cells_topic": ("schemaless.bus.faust_cells", "cells_topic"),
    "each_cell": ("schemaless.bus.faust_cells", "each_cell"),
    "faust_app": ("schemaless.bus.faust_app", "faust_app"),
    "decode_body": ("schemaless.codec", "decode_body"),
    "decode_record": ("schemaless.record", "decode_record"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
