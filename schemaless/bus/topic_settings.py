"""The settings of the two topics of a datastore, and which settings of existing topics are refused (I7). Pure.

A setting is refused if it would lose progress or stop a partition for good. One that only shortens the topic's history,
or may refuse cells of a master whose clock is ahead, is logged: MySQL keeps all history, and less may be wanted here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from schemaless.errors import Misconfigured
from schemaless.location import INT64_MAX

MESSAGE_BYTES_MAX = 4 << 20
"""Largest size of one record. A body has at most 1 MiB as sent, and may grow in its stored form."""

BODY_BYTES_MAX = MESSAGE_BYTES_MAX - 4096
"""Largest stored body that surely fits a record. The rest is for the key, the headers and the other fields."""

CELLS: Mapping[str, str] = {
    "cleanup.policy": "delete",
    "retention.ms": "-1",
    "retention.bytes": "-1",
    "max.message.bytes": str(MESSAGE_BYTES_MAX),
    # Timestamps are created_at: a master's clock may be ahead of the broker's by any amount.
    "message.timestamp.after.max.ms": str(INT64_MAX),
}
PROGRESS: Mapping[str, str] = {
    "cleanup.policy": "compact",
    "retention.ms": "-1",
    # Read from its beginning whenever a partition changes hands, so old segments are compacted early.
    "segment.bytes": str(16 << 20),
    "segment.ms": str(3_600_000),
    "min.cleanable.dirty.ratio": "0.1",
}


@dataclass(frozen=True, slots=True)
class _Rule:
    setting: str
    fits: Callable[[str], bool]
    refused: bool
    otherwise: str


def _is(*wanted: str) -> Callable[[str], bool]:
    return lambda value: value in wanted


def _at_least(number: int) -> Callable[[str], bool]:
    return lambda value: int(value) >= number


_YEAR_MS = 365 * 86_400_000
_RULES_OF_CELLS = (
    _Rule("cleanup.policy", _is("delete", ""), True, "older versions would vanish from between others"),
    _Rule("max.message.bytes", _at_least(MESSAGE_BYTES_MAX), True, "a large cell would stop its partition for good"),
    _Rule("retention.ms", _is("-1"), False, "the topic forgets cells; older ones are in MySQL only"),
    _Rule("retention.bytes", _is("-1"), False, "the topic forgets cells; older ones are in MySQL only"),
    _Rule("message.timestamp.after.max.ms", _at_least(_YEAR_MS), False, "a master whose clock is ahead stops shards"),
    _Rule("message.timestamp.before.max.ms", _at_least(_YEAR_MS), False, "old cells can't be published"),
    _Rule("message.timestamp.type", _is("CreateTime"), False, "a record's timestamp is not its cell's created_at"),
)
_RULES_OF_PROGRESS = (_Rule("cleanup.policy", _is("compact"), True, "progress would expire, or be read without end"),)


def check_cells_settings(topic: str, found: Mapping[str, str]) -> list[str]:
    """Returns warnings about the settings of a cells topic. Raises Misconfigured for one that can't be used."""
    return _check(topic, found, _RULES_OF_CELLS, CELLS)


def check_progress_settings(topic: str, found: Mapping[str, str]) -> list[str]:
    """Returns warnings about the settings of a progress topic. Raises Misconfigured for one that can't be used."""
    return _check(topic, found, _RULES_OF_PROGRESS, PROGRESS)


def _check(topic: str, found: Mapping[str, str], rules: tuple[_Rule, ...], made_with: Mapping[str, str]) -> list[str]:
    # A setting that the broker doesn't know breaks no rule.
    broken = [rule for rule in rules if rule.setting in found and not rule.fits(found[rule.setting])]
    warnings = [
        f"topic {topic} has {rule.setting}={found[rule.setting]}: {rule.otherwise}"
        + (f"; it is made with {made_with[rule.setting]}" if rule.setting in made_with else "")
        for rule in broken
    ]
    for rule, text in zip(broken, warnings, strict=True):
        if rule.refused:
            raise Misconfigured(f"{text}: alter the topic")
    return warnings
