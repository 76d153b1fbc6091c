"""The findings of an audit as values and as a JSON document, and how long it waits before it reports them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from schemaless.names import TRIGGER_PREFIX
from schemaless.quantity import quantity

if TYPE_CHECKING:
    from schemaless.storage.refusal_table import Refused

STALL_S = 30.0
FINDINGS_MAX = 100
"""How many findings of a datastore are named, unless all are asked for. More are only counted (I14)."""
_SHARDS_NAMED_MAX = 5
POLL_S = 0.1


class Patience:
    """How long an audit waits for tailers and consumers to reach the heads that it fixed.

    It ends for good after `stall_s` without progress, so that one stuck shard is not waited for again and again.
    """

    def __init__(self, stall_s: float, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._stall_s = stall_s
        self._sleep = sleep
        self._waited_s = 0.0

    def renew(self) -> None:
        """Records progress."""
        if self._waited_s < self._stall_s:
            self._waited_s = 0.0

    def wait(self) -> bool:
        """Sleeps for a moment. Returns False at once when no patience is left."""
        if self._waited_s >= self._stall_s:
            return False
        self._sleep(POLL_S)
        self._waited_s += POLL_S
        return True


class FindingKind(StrEnum):
    MYSQL_MISSING = "missing in MySQL"
    MYSQL_WRONG = "wrong in MySQL"
    MINION_LACKS = "missing on a minion"
    TOPIC_MISSING = "missing in the topic"
    TOPIC_EXTRA = "extra in the topic"
    TOPIC_DIFFERS = "differs in the topic"
    TOPIC_PARTITIONS = "partitions of a topic differ"
    INDEX_MISSING = "missing in an index"
    INDEX_EXTRA = "extra in an index"
    INDEX_DIFFERS = "differs in an index"
    PROGRESS_WRONG = "wrong in the progress topic"
    CHECKPOINT_BEHIND = "consumer behind"
    CHECKPOINT_COUNT = "count of a consumer differs"
    PARKED_DIFFERS = "parked cells differ"
    OTHER_HISTORY = "stands on another history"
    HOME_DIFFERS = "open elsewhere than at home"


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """One contradiction of a promise. `shard` is -1 where it concerns several, or none."""

    kind: FindingKind
    shard: int
    detail: str


class Findings:
    """Names the first findings, or all if `findings_max` is None, and counts all of them."""

    def __init__(self, findings_max: int | None = FINDINGS_MAX) -> None:
        self.named: list[AuditFinding] = []
        self.unnamed = 0
        self.counts: Counter[FindingKind] = Counter()
        self._max = findings_max

    def add(self, kind: FindingKind, shard: int, detail: str, count: int = 1) -> None:
        """Adds a finding. `count` is above 1 if it stands for several cells in a row."""
        self.counts[kind] += count
        if self._max is None or len(self.named) < self._max:
            self.named.append(AuditFinding(kind, shard, detail))
        else:
            self.unnamed += count

    @property
    def total(self) -> int:
        return self.counts.total()


@dataclass(slots=True)
class ShardReport:
    """One shard, up to the head that the audit fixed at its start.

    `held_from` is the first added_id that the topic still holds, None when it holds none. `not_held` counts the cells
    before it that a promise says were published. `superseded_by_generation` counts records of generations that a later
    one has replaced (I13). `topic_end` is the highest added_id in the topic, also beyond the head. `waiting` counts the
    cells that nobody has published yet, because an operator paused tailing. `erased` cells of MySQL have no body any
    more, and their records may.
    """

    shard: int
    generation: int
    head: int
    mysql: int = 0
    topic: int = 0
    matched: int = 0
    not_held: int = 0
    waiting: int = 0
    erased: int = 0
    superseded_by_generation: Counter[int] = field(default_factory=Counter)
    held_from: int | None = None
    topic_end: int = 0

    @property
    def superseded(self) -> int:
        return self.superseded_by_generation.total()

    def document(self) -> dict[str, Any]:
        """Returns the report as JSON."""
        counts = {name: getattr(self, name) for name in self.__slots__ if name != "superseded_by_generation"}
        by_generation = {str(generation): count for generation, count in self.superseded_by_generation.items()}
        return counts | {"superseded": self.superseded, "superseded_by_generation": by_generation}


@dataclass(slots=True)
class IndexReport:
    """One version of an index. `moved_on` counts rows with newer cells than the fixed heads, which can't be judged."""

    name: str
    expected: int = 0
    found: int = 0
    matched: int = 0
    number: int = 1
    moved_on: int = 0


@dataclass(slots=True)
class ParkedReport:
    """The cells that one program set aside. `counted` are those of its checkpoints, and `found` those of its records.

    `parked` records are all, also of cells before a checkpoint began to count, the oldest for `oldest_s`. `waiting`
    counts the cells that wait for their next attempt or behind another cell.
    """

    consumer: str
    counted: int = 0
    found: int = 0
    parked: int = 0
    waiting: int = 0
    oldest_s: float = 0.0

    def warning(self, datastore: str) -> str | None:
        if not self.parked:
            return None
        program = self.consumer.removeprefix(TRIGGER_PREFIX)
        return (
            f"{self.consumer} has {quantity(self.parked, 'parked cell')}, the oldest for {self.oldest_s:.0f} s:"
            f" schemaless parked list {program} --datastore {datastore}"
        )

    def document(self) -> dict[str, object]:
        return {"parked": self.parked, "waiting": self.waiting, "oldest_s": round(self.oldest_s, 1)}


@dataclass(frozen=True, slots=True)
class ConsumerReport:
    """One consumer. `finished` counts the cells of all shards that its checkpoints have passed.

    `parked` has what a trigger program set aside, None for an index. `paused_until` has the command that ends its pause
    while an operator has paused it: what it hasn't finished waits, and breaks no promise.
    """

    name: str
    cells: int
    finished: int
    parked: ParkedReport | None = None
    paused_until: str | None = None

    @property
    def waits(self) -> str | None:
        """Returns what waits while an operator has paused it."""
        if self.paused_until is None:
            return None
        left = quantity(self.cells - self.finished, "cell")
        return f"{self.name} is paused. As expected, that leaves {left} to work on, until `{self.paused_until}`"

    def document(self) -> dict[str, object]:
        document = {
            "name": self.name,
            "cells": self.cells,
            "finished": self.finished,
            "paused": self.paused_until is not None,
        }
        return document if self.parked is None else {**document, **self.parked.document()}


@dataclass(slots=True)
class AuditReport:
    datastore: str
    shards: Sequence[ShardReport]
    indexes: Sequence[IndexReport]
    consumers: Sequence[ConsumerReport]
    findings: Findings
    buffered: int
    oldest_buffered_s: float
    refused: Sequence[tuple[str, Refused]]
    """By home what it refuses."""
    conflicts: int
    ahead: Sequence[int]
    """Shards whose last created_at is in the future."""
    foreign_records: int
    seeks: int
    seconds: float
    is_paused: bool = False
    """Whether an operator has stopped tailing: then what the topic lacks waits, and nothing is lost."""
    not_compared: Sequence[str] = ()
    """Indexes whose entries were not compared, and minions, and why."""

    @property
    def clean(self) -> bool:
        return self.findings.total == 0

    @property
    def warnings(self) -> list[str]:
        """Facts that an operator should know, although no promise forbids them."""
        superseded = sum(shard.superseded for shard in self.shards)
        not_held = sum(shard.not_held for shard in self.shards)
        oldest_s = self.oldest_buffered_s
        counts = {
            f"{quantity(self.buffered, 'cell')} in a buffer, the oldest for {oldest_s:.0f} s": self.buffered,
            f"{quantity(self.conflicts, 'conflict')} recorded": self.conflicts,
            f"shards {list(self.ahead)[:_SHARDS_NAMED_MAX]} met a clock that was ahead": len(self.ahead),
            f"{quantity(superseded, 'record')} of superseded generations: {self._superseded()}": superseded,
            f"{quantity(not_held, 'cell')} from before what the topic holds: {self._beginnings()}": not_held,
            f"{quantity(self.seeks, 'seek')}: an operator said from where a shard is published": self.seeks,
            f"{quantity(self.foreign_records, 'foreign record')} in the topic": self.foreign_records,
        }
        refusals = [
            f"the home {home} refuses {quantity(refused.cells, 'buffered cell')}, for {refused.oldest_s:.0f} s:"
            f" {refused.reason}"
            for home, refused in self.refused
        ]
        waiting = quantity(sum(shard.waiting for shard in self.shards), "cell")
        waits = (
            f"tailing is paused. As expected, that leaves {waiting} to publish, until"
            f" `schemaless tailer resume {self.datastore}`"
        )
        return (
            [waits] * self.is_paused
            + [consumer.waits for consumer in self.consumers if consumer.waits is not None]
            + [text for text, count in counts.items() if count]
            + [f"{why}: not compared" for why in self.not_compared]
            + [why for one in self.consumers if one.parked and (why := one.parked.warning(self.datastore))]
            + refusals
        )

    def _beginnings(self) -> str:
        """Returns where the topic begins, for shards whose first cells it no longer holds."""
        cut = [shard for shard in self.shards if shard.not_held]
        named = [
            f"shard {shard.shard} {'has none left' if shard.held_from is None else f'begins at {shard.held_from}'}"
            for shard in cut[:_SHARDS_NAMED_MAX]
        ]
        more = [quantity(len(cut) - len(named), "more shard")] if len(cut) > len(named) else []
        return ", ".join(named + more)

    def _superseded(self) -> str:
        """Returns how many superseded records the topic has, by shard and generation."""
        counts = [
            f"shard {shard.shard} has {count} of generation {generation}"
            for shard in self.shards
            for generation, count in sorted(shard.superseded_by_generation.items())
        ]
        more = [f"{len(counts) - _SHARDS_NAMED_MAX} more"] if len(counts) > _SHARDS_NAMED_MAX else []
        return ", ".join(counts[:_SHARDS_NAMED_MAX] + more)

    def document(self) -> dict[str, Any]:
        """Returns the report as JSON."""
        return {
            "datastore": self.datastore,
            "clean": self.clean,
            "cells": self.cells(),
            "shards": [shard.document() for shard in self.shards],
            "indexes": [{name: getattr(index, name) for name in IndexReport.__slots__} for index in self.indexes],
            "consumers": [consumer.document() for consumer in self.consumers],
            "findings": [{"kind": f.kind, "shard": f.shard, "detail": f.detail} for f in self.findings.named],
            "findings_unnamed": self.findings.unnamed,
            "findings_total": self.findings.total,
            "findings_by_kind": dict(self.findings.counts),
            "warnings": self.warnings,
            "seconds": round(self.seconds, 3),
        }

    def cells(self) -> dict[str, int]:
        """Returns the sums over the shards."""
        names = ("head", "mysql", "topic", "matched", "not_held", "waiting", "superseded", "erased")
        return {name: sum(getattr(shard, name) for shard in self.shards) for name in names}
