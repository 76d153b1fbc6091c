"""Made-up trips: keys and bodies of about 300 bytes, and the HTTP requests that put and read them."""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from schemaless.cell import CellKey, ColumnName, RefKey, RowKey
from schemaless.codec import parse_json_body
from schemaless.sharding import shard_of
from schemaless.storage.entity_table import ShardCell

COLUMN = ColumnName("BASE")
_CITIES = ("San Francisco", "New York", "Berlin", "Lagos", "Tokyo", "São Paulo")


@dataclass(frozen=True)
class Trip:
    """One cell to put. The same bytes go to both sides of a comparison."""

    row_key: uuid.UUID
    json: bytes
    ref_key: int = 1

    @cached_property
    def stored(self) -> bytes:
        """The body in its stored form."""
        return parse_json_body(self.json)

    def cell(self, shards: int) -> ShardCell:
        key = CellKey(RowKey(self.row_key.bytes), COLUMN, RefKey(self.ref_key))
        return ShardCell(key, self.stored, shard_of(self.row_key.bytes, shards))

    def item(self) -> dict[str, object]:
        """Item of a batch put."""
        return {
            "row_key": str(self.row_key),
            "column_name": COLUMN,
            "ref_key": self.ref_key,
            "body": json.loads(self.json),
        }


class TripMaker:
    """An endless supply of trips, never the same key twice. The same seed gives the same trips."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def make(self, count: int) -> list[Trip]:
        return [self._trip() for _ in range(count)]

    def _uuid(self) -> uuid.UUID:
        return uuid.UUID(int=self._random.getrandbits(128), version=4)

    def _trip(self) -> Trip:
        draw = self._random
        body = {
            "driver_uuid": str(self._uuid()),
            "rider_uuid": str(self._uuid()),
            "city": draw.choice(_CITIES),
            "status": "completed",
            "requested_at": f"2026-0{draw.randint(1, 9)}-1{draw.randint(0, 9)}T08:{draw.randint(10, 59)}:00Z",
            "distance_m": draw.randint(300, 60_000),
            "fare": round(draw.uniform(4, 90), 2),
            "surge": draw.choice((1.0, 1.2, 1.8)),
            "pickup": [round(draw.uniform(-90, 90), 6), round(draw.uniform(-180, 180), 6)],
        }
        return Trip(self._uuid(), json.dumps(body, ensure_ascii=False).encode())


def put_request(trip: Trip, prefix: str = "", token: str | None = None) -> bytes:
    path = f"{prefix}/cells/{trip.row_key}/{COLUMN}/{trip.ref_key}"
    return _request("PUT", path, trip.json, f"Authorization: Bearer {token}\r\n" if token else "")


def newest_request(row_key: uuid.UUID, prefix: str = "") -> bytes:
    return get_request(f"{prefix}/cells/{row_key}/{COLUMN}")


def get_request(path: str) -> bytes:
    return _request("GET", path)


def batch_request(trips: Sequence[Trip], prefix: str) -> bytes:
    payload = json.dumps({"cells": [trip.item() for trip in trips]}, ensure_ascii=False).encode()
    return _request("POST", f"{prefix}/batch/put", payload)


def _request(method: str, path: str, payload: bytes = b"", more: str = "") -> bytes:
    body = f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n" if payload else ""
    return f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{more}{body}\r\n".encode() + payload
