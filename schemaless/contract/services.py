"""The shapes of what operators of the service get: status, topology, tokens, health."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from schemaless.access import Scope
from schemaless.contract.call import ApiCall, Option, within
from schemaless.contract.cells import Count, TimeText, View
from schemaless.contract.programs import ShardReasonView, WorkerView

SYNC_WAIT_MAX_S = 300.0
ORDER_WAIT_MAX_S = 60.0
_AT = "2026-01-31T08:00:00.000000Z"


class EntranceView(View, frozen=True):
    """Where to go from here."""

    service: Literal["schemaless"]
    ui: Annotated[str, Meta(description="The page that shows the installation.")]
    docs: Annotated[str, Meta(description="A page to read and try every call.")]
    openapi: Annotated[str, Meta(description="The same for programs.")]
    calls: Annotated[str, Meta(description="The prefix of all calls of a datastore.")]
    healthz: str
    readyz: str
    metrics: str

    example: ClassVar[Any] = {
        "service": "schemaless",
        "ui": "/ui",
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
    stall: str | None
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
    stall: str | None
    why: str | None
    heads_sum: int | None
    lag_s: float | None
    setting_faults: list[str]


class ClusterView(View, frozen=True):
    """One cluster as this process sees it. `generations` are the lowest and the highest one of its shards."""

    heads_sum: int | None
    generations: list[int] | None
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
    tailing_reason: str | None
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
        "tailing_reason": None,
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


class TopologyServerView(ServerView, frozen=True):
    """`state` is what the controller makes of a server: master, voter, following, silent, diverged or remaking. It is
    null where no controller said anything.
    """

    lag_s: float
    state: str | None
    why: str


class ControllerWordView(View, frozen=True):
    """What a controller makes of a cluster, such as healthy, silent, dead or stuck, why, and when it said so last."""

    state: str
    why: str
    controller: str
    at: TimeText

    example: ClassVar[Any] = {"state": "healthy", "why": "", "controller": "host-4711", "at": _AT}


class OperationView(View, frozen=True):
    """An order to a controller: who gave it, since when its state is open, done, refused or failed, and what came of
    it, or how far it is.
    """

    cluster: str
    order: str
    node: str | None
    actor: str
    since: TimeText
    job: str
    state: Literal["open", "done", "refused", "failed"]
    told: str

    example: ClassVar[Any] = {"cluster": "a", "order": "switch", "node": "a2", "actor": "ops", "since": _AT} | {
        "job": "1f0c9c8b7a6d5e4f",
        "state": "done",
        "told": "a2 is the master of a",
    }


class ServersView(View, frozen=True):
    """The servers of a cluster. `epoch` is that of the master's appointment, 0 without one. `voters` are the minions
    that must be heard before another master is opened. `state` is healthy, joining, or closed.
    `order` is the last order to its controller.
    """

    epoch: int
    state: str
    master: ServerView
    voters: list[ServerView]
    nodes: list[TopologyServerView]
    controller: ControllerWordView | None
    order: OperationView | None


class MoveView(View, frozen=True):
    """A shard on its way to another cluster: copying, ready or closing, with the rate in cells a second, and why it
    waits, if it does.
    """

    shard: Count
    source: str
    target: str
    state: str
    copied: Count
    head: Count
    cells_s: Count
    told: str

    example: ClassVar[Any] = {"shard": 3, "source": "a", "target": "c", "state": "copying"} | {
        "copied": 41_000,
        "head": 244_000,
        "cells_s": 9_200,
        "told": "",
    }


class TopologyView(View, frozen=True):
    """The servers. Shard n has its home on `placement[n]`. `version` is the highest epoch. `operation` is an order
    under way, and `moves` are the shards that change their home. Topics of another `installation` are no topics of it.
    """

    datastore: str
    installation: str
    version: int
    shards: Count
    partitions: Count
    placement: list[str]
    clusters: dict[str, ServersView]
    operation: OperationView | None
    moves: list[MoveView]

    example: ClassVar[Any] = {
        "datastore": "mezzanine",
        "installation": "9f86d081884c7d65",
        "version": 3,
        "shards": 2,
        "partitions": 2,
        "placement": ["a", "b"],
        "clusters": {
            "a": {
                "epoch": 3,
                "state": "healthy",
                "master": {"name": "a1", "role": "master", "host": "10.0.0.1", "port": 3306},
                "voters": [],
                "nodes": [
                    {"name": "a1", "role": "master", "host": "10.0.0.1", "port": 3306, "lag_s": 0.0}
                    | {"state": "master", "why": ""}
                ],
                "controller": ControllerWordView.example,
                "order": OperationView.example,
            }
        },
        "operation": None,
        "moves": [MoveView.example],
    }


class TopologyOrderRequest(msgspec.Struct, forbid_unknown_fields=True):
    """What a controller shall do about the master of a cluster.

    `node` is the new master, for switch and promote, or the server that rejoin makes anew. `without` names servers that
    promote needn't hear, and `fenced` confirms that none of them takes writes. `dry_run` orders nothing.
    """

    order: Literal["switch", "promote", "open", "acknowledge", "rejoin"]
    cluster: Annotated[str, Option("a storage cluster", "CLUSTER")]
    node: Annotated[str | None, Option("the new master; default: the best one. Of rejoin, the server", "NODE")] = None
    without: Annotated[list[str], Option("a server that need not be heard; may be given several times")] = []
    fenced: Annotated[bool, Option("you made sure that the servers of --without take no writes")] = False
    wait: Annotated[float, within(0, ORDER_WAIT_MAX_S), Option("seconds to wait for the controller at most")] = 30.0
    dry_run: Annotated[bool, Option("only say what is so now")] = False

    example: ClassVar[Any] = {"order": "switch", "cluster": "a", "node": "a2", "wait": 30}


class VoterView(View, frozen=True):
    """A minion that must be heard before another master is opened."""

    name: str
    lag_s: float


class TopologyOrderView(View, frozen=True):
    """What became of an order: `told` is the controller's sentence once its state is done. A dry run has no job."""

    job: str | None
    state: Literal["open", "done", "dry_run"]
    told: str
    master: str
    voters: list[VoterView]

    example: ClassVar[Any] = {
        "job": "1f0c9c8b7a6d5e4f",
        "state": "done",
        "told": "a2 is the master of a",
        "master": "a2",
        "voters": [{"name": "a1", "lag_s": 0.0}],
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


class BufferView(View, frozen=True):
    """What waits in buffers for one home. `rate`: by how many rows a second it grows, or shrinks if below 0."""

    rows: Count
    bytes: Count
    oldest_s: float
    rate: float | None


class BuffersView(View, frozen=True):
    """What waits in buffers, by home. `unknown` says by cluster why its buffer can't be read."""

    homes: dict[str, BufferView]
    unknown: dict[str, str]

    example: ClassVar[Any] = {
        "homes": {"a": {"rows": 120, "bytes": 9000, "oldest_s": 4.2, "rate": -30.0}},
        "unknown": {},
    }


class SyncRequest(msgspec.Struct, forbid_unknown_fields=True):
    """How many seconds to wait at most."""

    wait: Annotated[
        float, within(0, SYNC_WAIT_MAX_S), Option("seconds to wait at most; then the exit status is 1", "--timeout")
    ] = 30.0

    example: ClassVar[Any] = {"wait": 30}


class SyncedView(View, frozen=True):
    """What was buffered at the call is readable at home."""

    waited_s: float

    example: ClassVar[Any] = {"waited_s": 0.4}


STATUS = ApiCall(
    method="GET",
    path="/status",
    scope=Scope.READ,
    says="Clusters with their servers and buffered cells, consumers with their lag and why they stopped.",
    answers={200: StatusView},
)
TOPOLOGY = ApiCall(
    method="GET",
    path="/topology",
    scope=Scope.READ,
    says="The servers, and which cluster is home to which shards.",
    answers={200: TopologyView},
)
TOPOLOGY_ORDER = ApiCall(
    method="POST",
    path="/topology/orders",
    scope=Scope.ADMIN,
    says="Orders a controller to switch, promote or open the master of a cluster, to acknowledge a promotion, or to"
    " make a minion anew. It needs a token for every datastore. 202 when no controller settled it within `wait`, 409"
    " when it was refused.",
    payload=TopologyOrderRequest,
    answers={200: TopologyOrderView, 202: TopologyOrderView},
    problems=(409,),
)
BUFFER = ApiCall(
    method="GET",
    path="/buffer",
    scope=Scope.READ,
    says="What waits in buffers for each home: rows, bytes, the age of the oldest, and how fast it grows or shrinks.",
    answers={200: BuffersView},
)
BUFFER_SYNC = ApiCall(
    method="POST",
    path="/buffer/sync",
    scope=Scope.WRITE,
    says="Answers when everything that was buffered at the call is readable at home, or 503 when `wait` is over.",
    payload=SyncRequest,
    optional=True,
    answers={200: SyncedView},
)
