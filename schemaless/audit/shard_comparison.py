"""One shard: its cells in MySQL beside its records in the topic, both in added_id order. Pure; one pass, no lookback.

What is promised: every cell up to the head is in the topic exactly once, in order, with the same content (I7).
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from schemaless.audit.report import FindingKind, Findings, ShardReport


class Digest(msgspec.Struct, frozen=True, gc=False):
    """A cell, by its place and a hash of all that its record holds."""

    added_id: int
    hash: bytes


class ShardComparison:
    """`stored` yields the cells of MySQL up to the head of the report. `cut`: the topic's beginning was cut off."""

    def __init__(self, report: ShardReport, stored: Iterator[Digest], findings: Findings, *, cut: bool) -> None:
        self.report = report
        self._stored = stored
        self._findings = findings
        self._cut = cut
        self._next: Digest | None = None
        self._begun = False
        self._last = 0

    @property
    def complete(self) -> bool:
        """Whether the topic has brought everything up to the head."""
        return self._last >= self.report.head

    def take(self, record: Digest) -> None:
        """The shard's next record in the topic."""
        report = self.report
        report.topic_end = max(report.topic_end, record.added_id)
        if record.added_id > report.head:
            return  # written after the heads were fixed, or lost in MySQL: the head as it is then will tell
        report.topic += 1
        if report.held_from is None:
            report.held_from = record.added_id
        self._pass_by(record.added_id)
        if record.added_id <= self._last:
            self._found(FindingKind.TOPIC_EXTRA, f"cell {record.added_id} comes again, or after cell {self._last}")
            return
        self._last = record.added_id
        if self._next is None or self._next.added_id != record.added_id:
            self._found(FindingKind.TOPIC_EXTRA, f"cell {record.added_id} is not in MySQL")
            return
        if self._next.hash == record.hash:
            report.matched += 1
        else:
            self._found(FindingKind.TOPIC_DIFFERS, f"cell {record.added_id} has another content than in MySQL")
        self._advance()

    def finish(self) -> None:
        """The topic brings no more: what is left in MySQL is missing there."""
        self._pass_by(self.report.head + 1)

    def _pass_by(self, added_id: int) -> None:
        """Cells of MySQL before `added_id` were not in the topic."""
        if not self._begun:
            self._begun = True
            self._advance()
        not_held = self._cut and self._last == 0
        while self._next is not None and self._next.added_id < added_id:
            if not_held:
                self.report.not_held += 1
            else:
                self._found(FindingKind.TOPIC_MISSING, f"cell {self._next.added_id}")
            self._advance()

    def _advance(self) -> None:
        self._next = next(self._stored, None)

    def _found(self, kind: FindingKind, detail: str) -> None:
        self._findings.add(kind, self.report.shard, detail)
