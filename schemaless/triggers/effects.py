"""Effects once: an intent cell before an outside effect and an outcome cell after it, in the row of the trigger's cell.

All entries of one effect are versions of the column `PROGRAM.once`. Their ref_keys begin at a number that follows from
the effect's key, and count up: an intent, its outcome (happened or withdrawn), and after a withdrawal the next intent.
Cells never change, so of two processes only one gets its entry in. Each entry has a nonce, so the other one sees that.

    nothing, or withdrawn ──► intent ──► the call ──► happened: the stored result, without a call
                                │          └────────► withdrawn: the call says that it didn't happen
                                └──► intent without an outcome: a doubt, for people or for `resolve`

The ledger yields what is to be done, and is sent the answers: sync and async functions differ only in who performs it.
"""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from collections.abc import Callable, Generator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

from schemaless.cell import CellKey, PutStatus, row_key_text
from schemaless.client.answers import PutAnswer, VersionsPage
from schemaless.client.requests import encode
from schemaless.errors import Conflict, Corrupt, Invalid, InvalidRequest, Misconfigured, SchemalessError
from schemaless.found_cell import FoundCell
from schemaless.triggers.verdicts import DOUBT_PREFIX, DidNotHappen, Doubt, Park, Retry

RESULT_BYTES_MAX = 1 << 20
ENTRIES_MAX = 1 << 14
SETTLE_S = 10.0
"""An intent of another process is a doubt only after this time: its call may still be under way."""

_EFFECT_CHARACTERS_MAX = 100
_KEY_BITS = 48
_COLUMN_CHARACTERS_MAX = 64
_AGAIN_S = 1.0
_REMEMBERED_MAX = 10_000


class EntryState(StrEnum):
    INTENT = "intent"
    HAPPENED = "happened"
    WITHDRAWN = "withdrawn"


@dataclass(frozen=True, slots=True)
class EffectKey:
    """The identity of an effect. It follows from the cell's key, so retries, replays and new generations share it."""

    datastore: str
    program: str
    function: str
    effect: str
    cell: CellKey

    def __post_init__(self) -> None:
        given: object = self.effect
        if not isinstance(given, str) or not 1 <= len(given) <= _EFFECT_CHARACTERS_MAX:
            raise Misconfigured(
                f"the name of an effect must be 1 to {_EFFECT_CHARACTERS_MAX} characters, not {given!r}"
            )

    @property
    def text(self) -> str:
        """32 hexadecimal digits, for the idempotency key of a provider."""
        parts = [self.datastore, self.program, self.function, self.effect, self.cell]
        return hashlib.sha256(msgspec.msgpack.encode(parts)).hexdigest()[:32]

    @property
    def column(self) -> str:
        name = f"{self.program}.once"
        if len(name) <= _COLUMN_CHARACTERS_MAX:
            return name
        return f"{self.program[:40]}.{hashlib.sha256(self.program.encode()).hexdigest()[:16]}.once"

    @property
    def first(self) -> int:
        """The ref_key below those of its entries."""
        return (int(self.text[:16], 16) >> (64 - _KEY_BITS)) * ENTRIES_MAX


class ReadEntry(msgspec.Struct, frozen=True):
    """Asks for the newest entry, from the master: versions from `first` to `last`. Answered with a VersionsPage."""

    row_key: str
    column: str
    first: int
    last: int


class PutEntry(msgspec.Struct, frozen=True):
    """Asks for an entry to be written. Answered with a PutAnswer."""

    row_key: str
    column: str
    ref_key: int
    body: dict[str, Any]


class MakeCall(msgspec.Struct, frozen=True):
    """Asks for a call of the user's. Answered with its result."""

    call: Callable[[], Any]


EffectStep = ReadEntry | PutEntry | MakeCall
EffectFlow = Generator[EffectStep, Any, Any]
"""Is sent the answers of its steps, and is thrown their SchemalessError or DidNotHappen. Returns the result."""


class Ledger:
    """The effects of one process. It remembers what it knows and could not write. Threads may share it."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._process = uuid.uuid4().hex[:16]  # begins its nonces
        self._unbegun: dict[
            str, EffectEntry
        ] = {}  # by effect: an intent of ours whose call didn't begin or didn't happen
        self._unrecorded: dict[str, EffectEntry] = {}  # by effect: an outcome that is surely not written yet

    def once(self, key: EffectKey, call: Callable[[], Any], resolve: Callable[[], Any] | None) -> EffectFlow:
        """Returns the result of the effect. Makes the call only if no intent for it is stored but an own new one.

        Raises Doubt, Retry while another process may be at it, Park for a result that can't be stored, what the store
        refuses, and what the call raises.
        """
        newest = yield from self._newest(key)
        if newest.state is EntryState.HAPPENED:
            return _result(key, newest)
        known = self._unrecorded.get(key.text)
        if known is not None and (known.number, known.nonce) == (newest.number + 1, newest.nonce):
            return (yield from self._record(key, known))
        ours = self._unbegun.get(key.text)
        if newest.state is EntryState.INTENT and (ours is None or ours.nonce != newest.nonce):
            age_s = self._clock() - newest.written_at
            if abs(age_s) < SETTLE_S and not newest.nonce.startswith(self._process):
                raise Retry(_AGAIN_S)
            if resolve is None:
                raise Doubt(_doubt_text(key, newest))
            try:
                result = yield MakeCall(resolve)
            except DidNotHappen:
                newest = newest.next(EntryState.WITHDRAWN)
                yield from self._put(key, newest)
            else:
                return (yield from self._record(key, _outcome(key, newest, result)))
        intent = newest if newest.state is EntryState.INTENT else (yield from self._intend(key, newest))
        self._unbegun.pop(key.text, None)
        try:
            result = yield MakeCall(call)
        except DidNotHappen:
            yield from self._withdraw(key, intent)
            raise
        return (yield from self._record(key, _outcome(key, intent, result)))

    def _newest(self, key: EffectKey) -> Generator[EffectStep, Any, EffectEntry]:
        row_key, last = row_key_text(key.cell.row_key), key.first + ENTRIES_MAX - 1
        page: VersionsPage = yield ReadEntry(row_key, key.column, key.first, last)
        return _entry(key, page.cells[0]) if page.cells else EffectEntry(0, EntryState.WITHDRAWN, "")

    def _intend(self, key: EffectKey, newest: EffectEntry) -> Generator[EffectStep, Any, EffectEntry]:
        """Stores an intent. One that is buffered, or perhaps durable, doesn't count: a repeat may not see it."""
        if newest.number + 2 >= ENTRIES_MAX:
            raise Park(f"effect {key.effect} was withdrawn {newest.number // 2} times")
        ours = self._unbegun.get(key.text)
        if ours is None or ours.number != newest.number + 1:
            ours = newest.next(EntryState.INTENT, nonce=self._process + uuid.uuid4().hex)
            _remember(self._unbegun, key.text, ours)
        yield from self._put(key, ours)
        return ours

    def _put(self, key: EffectKey, entry: EffectEntry) -> Generator[EffectStep, Any, None]:
        try:
            answer: PutAnswer = yield _put_entry(key, entry)
        except Conflict as error:
            raise Retry(_AGAIN_S) from error  # another process was first: what it wrote is read again
        if answer.status is PutStatus.BUFFERED:
            raise Retry(_AGAIN_S)

    def _withdraw(self, key: EffectKey, intent: EffectEntry) -> Generator[EffectStep, Any, None]:
        """Records that the call didn't happen. If it can't, this process remembers it, and another one has a doubt."""
        try:
            yield _put_entry(key, intent.next(EntryState.WITHDRAWN))
        except SchemalessError:
            _remember(self._unbegun, key.text, intent)

    def _record(self, key: EffectKey, outcome: EffectEntry) -> Generator[EffectStep, Any, Any]:
        """Stores what happened. A buffered outcome is durable, so it is enough."""
        _remember(self._unrecorded, key.text, outcome)
        try:
            yield _put_entry(key, outcome)
        except Conflict:
            self._unrecorded.pop(key.text, None)
            found = yield from self._newest(key)
            if found.state is not EntryState.HAPPENED:
                raise Doubt(f"{DOUBT_PREFIX}{key.effect} happened, and was recorded as {found.state.value}") from None
            return _result(key, found)
        except InvalidRequest as error:  # the server is stricter
            if outcome.problem is not None:
                raise
            return (yield from self._record(key, outcome.without_result(f"can't be stored: {error}")))
        self._unrecorded.pop(key.text, None)
        return _result(key, outcome)


class EffectEntry(msgspec.Struct, frozen=True):
    """An entry of an effect. Its `number` counts from 1, and 0 stands before the first."""

    number: int
    state: EntryState
    nonce: str
    result: Any = None
    problem: str | None = None
    """Why what happened has no result."""
    written_at: float = 0.0

    def next(self, state: EntryState, nonce: str | None = None, result: Any = None) -> EffectEntry:
        return EffectEntry(self.number + 1, state, self.nonce if nonce is None else nonce, result)

    def without_result(self, why: str) -> EffectEntry:
        return msgspec.structs.replace(self, result=None, problem=why)


def _outcome(key: EffectKey, intent: EffectEntry, result: Any) -> EffectEntry:
    """Returns the entry of a result. One that can't be stored leaves a problem in its place."""
    found = intent.next(EntryState.HAPPENED, result=result)
    try:
        same = json.loads(json.dumps(result, allow_nan=False)) == result
        size = len(encode(_put_entry(key, found).body))
    except (TypeError, ValueError, RecursionError, Invalid):
        same, size = False, 0
    if not same:
        return found.without_result("is no JSON value")
    if size > RESULT_BYTES_MAX:
        return found.without_result(f"has {size} bytes, and at most {RESULT_BYTES_MAX} are stored")
    return found


def _result(key: EffectKey, entry: EffectEntry) -> Any:
    if entry.problem is not None:
        raise Park(f"effect {key.effect} happened, but its result {entry.problem}")
    return entry.result


def _put_entry(key: EffectKey, entry: EffectEntry) -> PutEntry:
    body = {"state": entry.state.value, "nonce": entry.nonce} | _identity(key)
    if entry.state is EntryState.HAPPENED:
        body |= {"result": entry.result} if entry.problem is None else {"problem": entry.problem}
    return PutEntry(row_key_text(key.cell.row_key), key.column, key.first + entry.number, body)


def _entry(key: EffectKey, cell: FoundCell) -> EffectEntry:
    body = cell.body
    wanted = _identity(key)
    named = {name: body.get(name, value) for name, value in wanted.items()}  # people may leave them out
    if named != wanted or body.get("state") not in list(EntryState):
        raise Corrupt(f"{key.column} {cell.ref_key} of row {cell.row_key} is no entry of {wanted}: {str(body)[:500]}")
    return EffectEntry(
        cell.ref_key - key.first, EntryState(body["state"]), str(body.get("nonce", "")), body.get("result"),
        body.get("problem"), cell.created_at.timestamp(),
    )  # fmt: skip


def _identity(key: EffectKey) -> dict[str, Any]:
    cell = key.cell
    return {
        "effect": key.effect,
        "function": key.function,
        "column_name": cell.column_name,
        "ref_key": cell.ref_key,
    }


def _doubt_text(key: EffectKey, intent: EffectEntry) -> str:
    return (
        f"{DOUBT_PREFIX}{key.effect} of {key.function} was begun and has no result. Ask the provider for"
        f" {key.text}, put"
        ' {"state": "happened", "result": …} or {"state": "withdrawn"}'
        f" as {key.column} {key.first + intent.number + 1} of the row, and retry"
    )


def _remember(entries: dict[str, EffectEntry], key: str, entry: EffectEntry) -> None:
    """Keeps the newest: what is forgotten becomes a doubt, which is never wrong."""
    entries.pop(key, None)
    entries[key] = entry
    while len(entries) > _REMEMBERED_MAX:
        entries.pop(next(iter(entries)), None)
