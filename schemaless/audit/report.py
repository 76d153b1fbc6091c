"""What an audit found: values, and their form for people and programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

FINDINGS_MAX = 100
"""Of one datastore, unless all are asked for; more are counted, not named (I14)."""
_SHARDS_NAMED_MAX = 5


class FindingKind(StrEnum):
    MYSQL_MISSING = "missing in MySQL"
    MYSQL_WRONG = "wrong in MySQL"
    TOPIC_MISSING = "missing in the topic"
    TOPIC_EXTRA = "extra in the topic"
    TOPIC_DIFFERS = "differs in the topic"
    INDEX_MISSING = "missing in an index"
    INDEX_EXTRA = "extra in an index"
    INDEX_DIFFERS = "differs in an index"
    CHECKPOINT_BEHIND = "consumer behind"


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """One thing that contradicts a promise."""

    kind: FindingKind
    shard: int
    detail: str


class Findings:
    """Names the first ones, or all where `findings_max` is None; counts all."""

    def __init__(self, findings_max: int | None = FINDINGS_MAX) -> None:
        self.named: list[AuditFinding] = []
        self.unnamed = 0
        self.counts: Counter[FindingKind] = Counter()
        self._max = findings_max

    def add(self, kind: FindingKind, shard: int, detail: str, count: int = 1) -> None:
        """`count` when one finding stands for several cells in a row."""
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

    `held_from` is the first added_id that the topic still holds, None when it holds none; cells before it are
    `not_held`. `superseded` counts records of a generation that a later one has replaced (I13). `topic_end` is the
    highest added_id in the topic, also beyond the head.
    """

    shard: int
    generation: int
    head: int
    mysql: int = 0
    topic: int = 0
    matched: int = 0
    not_held: int = 0
    superseded: int = 0
    held_from: int | None = None
    topic_end: int = 0


@dataclass(slots=True)
class IndexReport:
    """`moved_on`: rows whose cells went on after the heads were fixed, which nobody can judge."""

    name: str
    expected: int = 0
    found: int = 0
    matched: int = 0
    moved_on: int = 0


@dataclass(frozen=True, slots=True)
class ConsumerReport:
    """`finished`: cells, of all shards, that its checkpoints are past."""

    name: str
    cells: int
    finished: int


@dataclass(slots=True)
class AuditReport:
    datastore: str
    shards: Sequence[ShardReport]
    indexes: Sequence[IndexReport]
    consumers: Sequence[ConsumerReport]
    findings: Findings
    buffered: int
    conflicts: int
    foreign_records: int
    seeks: int
    seconds: float

    @property
    def clean(self) -> bool:
        return self.findings.total == 0

    @property
    def warnings(self) -> list[str]:
        """What somebody should know and no promise forbids."""
        superseded = sum(shard.superseded for shard in self.shards)
        not_held = sum(shard.not_held for shard in self.shards)
        told = {
            f"{self.buffered} cells wait in buffers": self.buffered,
            f"{self.conflicts} conflicts recorded": self.conflicts,
            f"{superseded} records of superseded generations": superseded,
            f"{not_held} cells are older than what the topic holds: {self._beginnings()}": not_held,
            f"{self.seeks} times an operator said from where a shard is published": self.seeks,
            f"{self.foreign_records} records in the topic are not ours": self.foreign_records,
        }
        return [text for text, count in told.items() if count]

    def _beginnings(self) -> str:
        """Where the topic begins, of the shards whose beginning it has lost."""
        cut = [shard for shard in self.shards if shard.not_held]
        named = [
            f"shard {shard.shard} {'has none left' if shard.held_from is None else f'begins at {shard.held_from}'}"
            for shard in cut[:_SHARDS_NAMED_MAX]
        ]
        more = [f"{len(cut) - len(named)} more shards"] if len(cut) > len(named) else []
        return ", ".join(named + more)

    def document(self) -> dict[str, Any]:
        """For programs."""
        return {
            "datastore": self.datastore,
            "clean": self.clean,
            "cells": self.cells(),
            "shards": [{name: getattr(shard, name) for name in ShardReport.__slots__} for shard in self.shards],
            "indexes": [{name: getattr(index, name) for name in IndexReport.__slots__} for index in self.indexes],
            "consumers": [{"name": c.name, "cells": c.cells, "finished": c.finished} for c in self.consumers],
            "findings": [{"kind": f.kind, "shard": f.shard, "detail": f.detail} for f in self.findings.named],
            "findings_unnamed": self.findings.unnamed,
            "findings_total": self.findings.total,
            "findings_by_kind": dict(self.findings.counts),
            "warnings": self.warnings,
            "seconds": round(self.seconds, 3),
        }

    def cells(self) -> dict[str, int]:
        """Sums over the shards."""
        names = ("head", "mysql", "topic", "matched", "not_held", "superseded")
        return {name: sum(getattr(shard, name) for shard in self.shards) for name in names}
