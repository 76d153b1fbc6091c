"""The shapes of what operators of the service get: status, topology, tokens, health."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Meta, UnsetType

from api.openapi.cell_views import Count, TimeText, View
from api.openapi.program_views import ShardReasonView, WorkerView
from schemaless.access import Scope

_AT = "2026-01-31T08:00:00.000000Z"


class EntranceView(View, frozen=True):
    """Where to go from here."""

    service: Literal["schemaless"]
    docs: Annotated[str, Meta(description="A page to read and try every call.")]
    openapi: Annotated[str, Meta(description="The same for programs.")]
    calls: Annotated[str, Meta(description="The prefix of all calls of a datastore.")]
    healthz: str
    readyz: str
    metrics: str

    example: ClassVar[Any] = {
        "service": "schemaless",
        "docs": "/docs",
        "openapi": "/openapi.json",
        "calls": "/v1/{datastore}",
        "healthz": "/healthz",
        "readyz": "/readyz",
        "metrics": "/metrics",
    }


class AliveView(View, frozen=True):
    """The process answers."""

    status: Literal["alive"]

    example: ClassVar[Any] = {"status": "alive"}


class StalledBacklogView(View, frozen=True):
    """A buffer whose cells don't come home."""

    datastore: str
    secondary: str
    home: str
    rows: Count
    oldest_s: float
    refused: Count


class ReadyView(View, frozen=True):
    """The catalogue can be read. `backlogs` are buffers that don't shrink."""

    status: Literal["ready"]
    datastores: list[str]
    backlogs: list[StalledBacklogView]

    example: ClassVar[Any] = {"status": "ready", "datastores": ["mezzanine"], "backlogs": []}


class ShardAheadView(View, frozen=True):
    """A shard whose time is frozen, because it met a clock that was ahead."""

    shard: Count
    last_created_at: TimeText


class ConsumerView(View, frozen=True):
    """An index or a trigger program, without each of its shards."""

    consumer: str
    kind: str
    name: str
    state: str
    reason: str | None
    lag: int
    stopped: list[ShardReasonView]


class RefusedView(View, frozen=True):
    """Buffered cells that their home refuses."""

    cells: Count
    oldest_s: float
    reason: str


class BacklogView(View, frozen=True):
    """What waits in a buffer for one home."""

    rows: Count
    bytes: Count
    oldest_s: float
    stalled: bool
    refused: RefusedView | None


class NodeView(View, frozen=True):
    """One server as this process sees it."""

    name: str
    role: str
    reachable: bool
    why: str | None
    heads_sum: int | None
    lag_s: float | None
    setting_faults: list[str]


class ClusterView(View, frozen=True):
    """One cluster as this process sees it."""

    heads_sum: int | None
    buffered: dict[str, int]
    backlogs: dict[str, BacklogView]
    conflicts: int | None
    nodes: list[NodeView]


class StatusView(View, frozen=True):
    """The whole picture of a datastore."""

    datastore: str
    shards: Count
    partitions: Count
    heads_sum: Count
    buffered: Count
    refused: Count
    conflicts: Count
    shards_ahead: list[ShardAheadView]
    tailing: str
    clusters: dict[str, ClusterView]
    consumers: list[ConsumerView]
    workers: list[WorkerView]
    consumers_unknown: dict[str, str]

    example: ClassVar[Any] = {
        "datastore": "mezzanine",
        "shards": 64,
        "partitions": 8,
        "heads_sum": 1400,
        "buffered": 0,
        "refused": 0,
        "conflicts": 0,
        "shards_ahead": [],
        "tailing": "running",
        "clusters": {},
        "consumers": [],
        "workers": [],
        "consumers_unknown": {},
    }


class ServerView(View, frozen=True):
    """A MySQL server, without its account."""

    name: str
    role: str
    host: str
    port: int


class ServersView(View, frozen=True):
    """The servers of a cluster."""

    master: ServerView
    minions: list[ServerView]


class TopologyView(View, frozen=True):
    """The servers. Shard n has its home on `placement[n mod its length]`."""

    datastore: str
    shards: Count
    partitions: Count
    placement: list[str]
    clusters: dict[str, ServersView]

    example: ClassVar[Any] = {
        "datastore": "mezzanine",
        "shards": 64,
        "partitions": 8,
        "placement": ["a", "b"],
        "clusters": {
            "a": {"master": {"name": "a-master", "role": "master", "host": "10.0.0.1", "port": 3306}, "minions": []}
        },
    }


class TokenView(View, frozen=True):
    """A token, without its secret."""

    name: str
    datastores: list[str]
    scope: Scope
    state: str
    created_at: TimeText
    expires_at: TimeText
    revoked_at: TimeText | None

    example: ClassVar[Any] = {
        "name": "loader",
        "datastores": ["mezzanine"],
        "scope": "write",
        "state": "active",
        "created_at": _AT,
        "expires_at": "2026-05-01T08:00:00.000000Z",
        "revoked_at": None,
    }


class TokensView(View, frozen=True):
    """The tokens that reach a datastore."""

    tokens: list[TokenView]

    example: ClassVar[Any] = {"tokens": [TokenView.example]}


class IssuedView(TokenView, frozen=True):
    """A new token. `token` is shown this once. `unreached` are clusters that learn of it when they are back."""

    token: str = ""
    unreached: list[str] | UnsetType = UNSET

    example: ClassVar[Any] = {"token": "sl_…", **TokenView.example, "unreached": []}


class RevokedView(View, frozen=True):
    """The name of the token that no longer counts."""

    name: str
    unreached: list[str]

    example: ClassVar[Any] = {"name": "loader", "unreached": []}
