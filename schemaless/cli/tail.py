"""`schemaless tail`: the cells topic as it is, filtered for people or programs, while its density is verified (I7).

Every record that is read is verified, also those that a filter hides. Faults are printed to standard error at once,
and the exit status is 1 at the end. The command needs Kafka and nothing else: no API, no MySQL, no checkout.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Annotated

import typer

from schemaless.cell import parse_time
from schemaless.cli.output import print_notice
from schemaless.cli.tail_view import TailFormat, TailView, parse_filter
from schemaless.cli.targets import JsonOption
from schemaless.client.local_stack import kafka_address
from schemaless.errors import Invalid
from schemaless.names import cells_topic_name
from schemaless.record import Record
from schemaless.runtime.extras import Extra, needs
from schemaless.stack.plan import DEFAULT_DATASTORE

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
    """Read the topic of a datastore and verify that it is dense. Exit status 1: a hole, a repeat or disorder."""
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
    try:
        with TopicStream(kafka_address(kafka), cells_topic_name(datastore)) as stream:
            partitions = stream.partitions()
            spans = {each: stream.span(each) for each in _chosen(partitions, partition or (), wanted.shards)}
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
    except KeyboardInterrupt:
        if view is None:
            print_notice("nothing was read yet")
            return
    print_notice(view.summary())
    raise typer.Exit(1 if view.faults else 0)


def _chosen(known: range, named: Sequence[int], shards: Iterable[int]) -> list[int]:
    """Returns the partitions to read: the named ones, of these the ones that hold the shards. Raises Invalid."""
    for partition in named:
        if partition not in known:
            raise Invalid("partition", f"must be from 0 to {len(known) - 1}")
    of_shards = {shard % len(known) for shard in shards}
    return [number for number in known if (not named or number in named) and (not of_shards or number in of_shards)]


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
