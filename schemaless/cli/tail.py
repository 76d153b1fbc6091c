"""`schemaless tail`: the cells topic as it is, filtered for people or programs, while its density is verified (I7).

Every record that is read is verified, also those that a filter hides. Faults are printed to standard error at once,
and the exit status is 1 at the end. The command needs Kafka and nothing else: no API, no MySQL, no checkout.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from enum import Enum
from itertools import islice
from typing import Annotated

import msgspec
import typer

from schemaless.cell import (
    RowKey,
    StoredCell,
    created_at_text,
    parse_column_name,
    parse_row_key,
    parse_time,
    row_key_text,
)
from schemaless.cli.interrupts import until_interrupted
from schemaless.cli.output import print_notice
from schemaless.cli.targets import JsonOption
from schemaless.client.transport import kafka_address
from schemaless.codec import body_json
from schemaless.errors import Corrupt, Invalid
from schemaless.names import cells_topic_name
from schemaless.quantity import noun_for, quantity
from schemaless.record import Announcement, ForeignRecord, Record, Seek, decoded, misplaced
from schemaless.runtime.extras import Extra, needs
from schemaless.stack.plan import DEFAULT_DATASTORE
from schemaless.subscriber.density import DensityCheck

BEGINNING, END = "beginning", "end"
_OFFSET = re.compile(r"([0-9]{1,9}):([0-9]{1,18})")

KafkaOption = Annotated[str, typer.Option("--kafka", help="host:port; default: SCHEMALESS_KAFKA, else the stack's")]
Texts = list[str] | None
Numbers = list[int] | None


def register(app: typer.Typer) -> None:
    app.command("tail")(tail)


@needs("tail", Extra.KAFKA)
def tail(  # noqa: PLR0913, PLR0917  # a parameter for each option
    datastore: Annotated[str, typer.Argument(help="name of the datastore")] = DEFAULT_DATASTORE,
    start: Annotated[str, typer.Option("--from", help="beginning, end, or a time as 2026-01-31T00:00:00Z")] = END,
    offset: Annotated[Texts, typer.Option(help="PARTITION:OFFSET, for that partition instead of --from")] = None,
    partition: Annotated[
        Numbers, typer.Option(help="only this partition; may be given several times, as the next three options")
    ] = None,
    shard: Annotated[Numbers, typer.Option(help="only cells of this shard")] = None,
    column: Annotated[Texts, typer.Option(help="only cells of this column")] = None,
    row: Annotated[Texts, typer.Option(help="only cells of the row with this UUID")] = None,
    follow: Annotated[bool, typer.Option(help="wait for new records at the end, until interrupted")] = True,
    limit: Annotated[int | None, typer.Option(min=1, help="end after so many cells")] = None,
    as_json: JsonOption = False,
    as_msgpack: Annotated[bool, typer.Option("--msgpack", help="print the records' values, one after another")] = False,
    kafka: KafkaOption = "",
) -> None:
    """Read the topic of a datastore and verify that it is dense. Exit status 1: it isn't, or a partition is wrong."""
    from schemaless.bus.reader import TopicStream

    since = 0 if start in (BEGINNING, END) else parse_time(start, "from")
    wanted = parse_filter(shard or (), column or (), row or (), since)
    offsets = {}
    for text in offset or ():
        match = _OFFSET.fullmatch(text)
        if match is None:
            raise Invalid("offset", "must be PARTITION:OFFSET")
        offsets[int(match[1])] = int(match[2])
    view: TailView | None = None
    with until_interrupted(), TopicStream(kafka_address(kafka), cells_topic_name(datastore)) as stream:
        partitions = stream.partitions()
        spans = {each: stream.span(each) for each in _chosen(partitions, partition or ())}
        starts = {each: span.low if start == BEGINNING else span.high for each, span in spans.items()}
        ends = {each: span.high for each, span in spans.items()}
        if start not in (BEGINNING, END):
            starts |= stream.offsets_at(list(spans), since // 1000)
        for each, to in offsets.items():
            if each not in spans:
                raise Invalid("offset", f"partition {each} is not read")
            if not spans[each].low <= to <= spans[each].high:
                raise Invalid("offset", f"partition {each} holds offsets {spans[each].low} to {spans[each].high}")
            starts[each] = to
        # Where a partition is read from its very beginning, the first cell of a shard must be the shard's first.
        complete = {each for each, span in spans.items() if starts[each] == span.low == 0}
        form = TailFormat.MSGPACK if as_msgpack else TailFormat.JSON if as_json else TailFormat.TEXT
        view = TailView(len(partitions), complete, wanted, form, print_notice)
        _copy(view, stream.follow(starts) if follow else stream.read(starts, ends), limit)
    if view is None:
        print_notice("nothing was read yet")
        return
    print_notice(view.summary())
    raise typer.Exit(1 if view.faults else 0)


def _chosen(known: range, named: Sequence[int]) -> list[int]:
    """Returns the partitions to read, the named ones or all. Raises Invalid.

    A shard's partition isn't known here: the topic may have more partitions than its datastore.
    """
    for partition in named:
        if partition not in known:
            raise Invalid("partition", f"must be from 0 to {len(known) - 1}")
    return [number for number in known if not named or number in named]


def _copy(view: TailView, pages: Iterable[Sequence[Record]], limit: int | None) -> None:
    """Writes lines to standard output until the limit, the end, or its reader closes it."""
    left = limit
    try:
        for page in pages:
            lines = list(islice(view.take(page), left))
            sys.stdout.buffer.write(b"".join(lines))
            sys.stdout.buffer.flush()
            left = None if left is None else left - len(lines)
            if left == 0:
                return
    except BrokenPipeError:  # Python flushes once more at its end, which must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# TailView: verifies all records of the topic for `schemaless tail`, and makes lines of those that were asked for.
#
# It is pure: records go in, lines and notices of faults come out. It remembers nothing but positions (I14).

_FOREIGN_NOTICES_MAX = 20

Notice = Callable[[str], None]


class TailFilter(msgspec.Struct, frozen=True):
    """Which cells are shown. An empty collection means all. `since` is in microseconds since the epoch."""

    shards: Collection[int] = ()
    columns: Collection[str] = ()
    row_keys: Collection[RowKey] = ()
    since: int = 0

    def passes(self, cell: StoredCell) -> bool:
        return (
            cell.created_at >= self.since
            and (not self.shards or cell.shard in self.shards)
            and (not self.columns or cell.column_name in self.columns)
            and (not self.row_keys or cell.row_key in self.row_keys)
        )


def parse_filter(shards: Iterable[int], columns: Iterable[str], rows: Iterable[str], since: int) -> TailFilter:
    """Parses what the options name. Raises Invalid."""
    return TailFilter(
        shards=frozenset(shards),
        columns=frozenset(parse_column_name(column, "column") for column in columns),
        row_keys=frozenset(map(parse_row_key, rows)),
        since=since,
    )


class TailFormat(Enum):
    """The format of a line of `schemaless tail`."""

    TEXT = "text"
    JSON = "json"
    """The API's JSON of a cell, with the partition and the offset of its record."""
    MSGPACK = "msgpack"
    """The record's value. MessagePack knows its own length, so nothing is needed between values."""

    def line(self, record: Record, cell: StoredCell) -> bytes:
        """Returns the line of a cell. Raises Corrupt for a body that can't be decoded."""
        if self is TailFormat.MSGPACK:
            return record.value
        if self is TailFormat.TEXT:
            location = f"{cell.shard}:{cell.generation}:{cell.added_id}"
            named = f"{location} {row_key_text(cell.row_key)} {cell.column_name} {cell.ref_key} "
            return named.encode() + (b"erased" if cell.is_erased else body_json(cell.body)) + b"\n"
        members: dict[str, object] = {
            "row_key": row_key_text(cell.row_key),
            "column_name": cell.column_name,
            "ref_key": cell.ref_key,
            **({"erased": {}} if cell.is_erased else {"body": msgspec.Raw(body_json(cell.body))}),
            "shard": cell.shard,
            "generation": cell.generation,
            "added_id": cell.added_id,
            "created_at": created_at_text(cell.created_at),
            "partition": record.partition,
            "offset": record.offset,
        }
        return msgspec.json.encode(members) + b"\n"


class TailView:
    """The lines and faults of the records of a topic. `complete` are the partitions that are read from offset 0."""

    def __init__(
        self, partitions: int, complete: Container[int], wanted: TailFilter, form: TailFormat, notice: Notice
    ) -> None:
        self.records = self.foreign = self.misplaced = 0
        self._partitions = partitions
        self._complete = complete
        self._wanted = wanted
        self._format = form
        self._notice = notice
        self._check = DensityCheck()

    @property
    def faults(self) -> int:
        """Number of holes, repeats, disorder and cells in a wrong partition so far."""
        return self._check.findings + self.misplaced

    def take(self, records: Sequence[Record]) -> Iterator[bytes]:
        """Verifies all records, and yields the lines of the cells that the filter lets pass."""
        for record in records:
            self.records += 1
            found = decoded(record)
            if not isinstance(found, ForeignRecord) and found.shard % self._partitions != record.partition:
                self.misplaced += 1
                if self.misplaced <= _FOREIGN_NOTICES_MAX:
                    self._notice(f"WRONG PARTITION of {self._partitions}: {misplaced(record, found.shard)}")
            if isinstance(found, StoredCell):
                self._verify(record, found)
                if self._wanted.passes(found):
                    try:
                        yield self._format.line(record, found)
                    except Corrupt as error:
                        self._skip(ForeignRecord(record.topic, record.partition, record.offset, str(error)))
            elif isinstance(found, Announcement):
                self._notice(f"shard {found.shard}: generation {found.generation} starts at {found.starts_at}")
                self._verify(record, found)
            elif isinstance(found, Seek):
                self._notice(
                    f"shard {found.shard}: an operator's seek to {found.location}: cells may come twice or be missing"
                )
            else:
                self._skip(found)

    def summary(self) -> str:
        verdict = (
            f"{self.faults} {noun_for(self.faults, 'FAULT').upper()}"
            if self.faults
            else "no hole, no repeat, no disorder"
        )
        foreign = f", {quantity(self.foreign, 'foreign record')}" if self.foreign else ""
        return f"{quantity(self.records, 'record')} verified: {verdict}{foreign}"

    def _verify(self, record: Record, found: StoredCell | Announcement) -> None:
        fault = self._check.take(found, complete=record.partition in self._complete)
        if fault is not None:
            self._notice(f"{fault} (partition {record.partition}, offset {record.offset})")

    def _skip(self, found: ForeignRecord) -> None:
        self.foreign += 1
        if self.foreign <= _FOREIGN_NOTICES_MAX:
            self._notice(f"not ours: {found}")
        if self.foreign == _FOREIGN_NOTICES_MAX:
            self._notice("further records that are not ours are only counted")
