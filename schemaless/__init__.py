"""Schemaless: an append-only store of immutable JSON cells whose change log is on Kafka.

These are the public names. The client, the subscribers' kit and the kit for Faust are loaded when they are first
used, so importing the core loads neither httpx nor Kafka nor Faust. A name whose extra of the wheel isn't installed
raises MissingExtra, an ImportError that says what to install.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from schemaless.codec import decode_body as decode_body
from schemaless.errors import (
    BusUnavailable as BusUnavailable,
    CellErased as CellErased,
    CellMissing as CellMissing,
    Conflict as Conflict,
    Corrupt as Corrupt,
    Fenced as Fenced,
    Forbidden as Forbidden,
    Invalid as Invalid,
    InvalidRequest as InvalidRequest,
    KeyErased as KeyErased,
    LocationGone as LocationGone,
    Malformed as Malformed,
    Misconfigured as Misconfigured,
    Misdirected as Misdirected,
    MissingExtra as MissingExtra,
    NotBuilt as NotBuilt,
    NotFound as NotFound,
    NotReady as NotReady,
    SchemalessError as SchemalessError,
    StorageUnavailable as StorageUnavailable,
    TooLarge as TooLarge,
    TooManyRequests as TooManyRequests,
    TopicMissing as TopicMissing,
    Unauthenticated as Unauthenticated,
    Unavailable as Unavailable,
    UnreadableCell as UnreadableCell,
    UnsupportedMedia as UnsupportedMedia,
)
from schemaless.found_cell import FoundCell as FoundCell
from schemaless.runtime.extras import Extra as _Extra, require as _require
from schemaless.location import Location as Location
from schemaless.record import (
    Announcement as Announcement,
    ForeignRecord as ForeignRecord,
    Seek as Seek,
    decode_record as decode_record,
)
from schemaless.position import Position as Position
from schemaless.triggers.retry_policy import RetryPolicy as RetryPolicy
from schemaless.subscriber.engine import Batch as Batch, GenerationChange as GenerationChange
from schemaless.triggers.decorator import ParkMode as ParkMode, TriggerCell as TriggerCell, trigger as trigger
from schemaless.triggers.context import Context as Context
from schemaless.triggers.verdicts import (
    DidNotHappen as DidNotHappen,
    Doubt as Doubt,
    Park as Park,
    Retry as Retry,
    Skip as Skip,
    Stop as Stop,
)
from schemaless.where import Where as Where

if TYPE_CHECKING:
    from schemaless.bus.faust_transport import faust_app as faust_app
    from schemaless.bus.faust_cells import cells_topic as cells_topic, each_cell as each_cell
    from schemaless.client.async_client import AsyncClient as AsyncClient
    from schemaless.client.attempts import Limits as Limits
    from schemaless.client.client import Client as Client, SchemalessClient as SchemalessClient
    from schemaless.client.transport import kafka_address as kafka_address
    from schemaless.client.requests import NewCell as NewCell
    from schemaless.subscriber.subscriber import Subscriber as Subscriber

_LOADED_LATER: dict[str, tuple[str, tuple[_Extra, ...]]] = {
    "AsyncClient": ("schemaless.client.async_client", ()),
    "Client": ("schemaless.client.client", ()),
    "Limits": ("schemaless.client.attempts", ()),
    "NewCell": ("schemaless.client.requests", ()),
    "SchemalessClient": ("schemaless.client.client", ()),
    "Subscriber": ("schemaless.subscriber.subscriber", (_Extra.KAFKA,)),
    "cells_topic": ("schemaless.bus.faust_cells", (_Extra.FAUST,)),
    "each_cell": ("schemaless.bus.faust_cells", (_Extra.FAUST,)),
    "kafka_address": ("schemaless.client.transport", ()),
    "faust_app": ("schemaless.bus.faust_transport", (_Extra.FAUST,)),
}
"""The module of each name, and the extras that it needs. The imports for type checkers above list the same names."""

_LOADED = [name for name, value in globals().items() if getattr(value, "__module__", "").startswith("schemaless.")]
__all__ = sorted([*(name for name in _LOADED if not name.startswith("_")), *_LOADED_LATER])  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _LOADED_LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, extras = _LOADED_LATER[name]
    _require(f"schemaless.{name}", *extras)
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
