"""`schemaless tail`: the cells topic as it is, filtered for people or programs, while its density is verified (I7).

Every record that is read is verified, also those that a filter hides. What is wrong goes to standard error at once,
and the exit status is 1 at the end. It needs Kafka and nothing else: no API, no MySQL, no checkout.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Annotated

import typer

from schemaless.cell import parse_time
from schemaless.cli.tail_view import Form, TailView, parse_filter
from schemaless.cli.targets import DEFAULT_DATASTORE, JsonOption, kafka_address
from schemaless.errors import Invalid
from schemaless.extras import Extra, needs
from schemaless.names import cells_topic_name
from schemaless.record import Record

if TYPE_CHECKING:
    from schemaless.bus.topic_stream import TopicStream

BEGINNING, END = "beginning", "end"
_OFFSET = re.compile(r"([0-9]{1,9}):([0-9]{1,18})")

KafkaOption = Annotated[str, typer.Option("--kafka", help="host:port; default: SCHEMALESS_KAFKA, else the stack's")]
Texts = list[str] | None
Numbers = list[int] | None


def register(app: typer.Typer) -> None:
    app.command("tail")(tail)


@needs("tail", Extra.KAFKA)
def tail(  # noqa: PLR0913, PLR0917  # a parameter for each option
    datastore: Annotated[str, typer.Argument(help="which datastore")] = DEFAULT_DATASTORE,
    start: Annotated[str, typer.Option("--from", help="beginning, end, or a time as 2026-01-31T00:00:00Z")] = END,
    offset: Annotated[Texts, typer.Option(help="PARTITION:OFFSET, for that partition instead of --from")] = None,
    partition: Annotated[
        Numbers, typer.Option(help="only this one; may be given several times, as the next three")
    ] = None,
    shard: Annotated[Numbers, typer.Option()] = None,
    column: Annotated[Texts, typer.Option()] = None,
    row: Annotated[Texts, typer.Option(help="UUID")] = None,
    follow: Annotated[bool, typer.Option(help="go on at the present end, until interrupted")] = True,
    limit: Annotated[int | None, typer.Option(min=1, help="end after so many cells")] = None,
    as_json: JsonOption = False,
    as_msgpack: Annotated[bool, typer.Option("--msgpack", help="the records' values, one after the other")] = False,
    kafka: KafkaOption = "",
) -> None:
    """Read the topic of a datastore and verify that it is dense. Exit status 1: a hole, a repeat or disorder."""
    from schemaless.bus.topic_stream import TopicStream

    since = 0 if start in (BEGINNING, END) else parse_time(start, "from")
    wanted = parse_filter(shard or (), column or (), row or (), since)
    form = Form.MSGPACK if as_msgpack else Form.JSON if as_json else Form.TEXT
    with TopicStream(kafka_address(kafka), cells_topic_name(datastore)) as stream:
        places = _Places(stream, _partitions(stream.partitions(), partition or (), wanted.shards))
        starts = places.starts(start, since // 1000, _parse_offsets(offset or ()))
        tailing = TailView(len(stream.partitions()), places.complete(starts), wanted, form, _tell)
        _copy(tailing, stream.read(starts, None if follow else places.ends()), limit)
    _tell(tailing.summary())
    raise typer.Exit(1 if tailing.faults else 0)


class _Places:
    """Where to begin and to end in each of some partitions. Fixed once, when made."""

    def __init__(self, stream: TopicStream, partitions: Sequence[int]) -> None:
        self._stream = stream
        self._spans = {partition: stream.span(partition) for partition in partitions}

    def starts(self, start: str, timestamp_ms: int, offsets: Mapping[int, int]) -> dict[int, int]:
        """Raises Invalid for an offset that the topic doesn't hold."""
        if start == BEGINNING:
            found = {partition: span.low for partition, span in self._spans.items()}
        elif start == END:
            found = self.ends()
        else:
            found = self.ends() | self._stream.offsets_at(list(self._spans), timestamp_ms)
        for partition, offset in offsets.items():
            span = self._spans.get(partition)
            if span is None:
                raise Invalid("offset", f"partition {partition} is not read")
            if not span.low <= offset <= span.high:
                raise Invalid("offset", f"partition {partition} holds offsets {span.low} to {span.high}")
        return found | dict(offsets)

    def ends(self) -> dict[int, int]:
        return {partition: span.high for partition, span in self._spans.items()}

    def complete(self, starts: Mapping[int, int]) -> set[int]:
        """Those that are read from their very beginning: there the first cell of a shard must be its first."""
        return {partition for partition, span in self._spans.items() if starts[partition] == span.low == 0}


def _partitions(known: range, named: Sequence[int], shards: Iterable[int]) -> list[int]:
    """Raises Invalid."""
    for partition in named:
        if partition not in known:
            raise Invalid("partition", f"must be from 0 to {len(known) - 1}")
    of_shards = {shard % len(known) for shard in shards}
    return [number for number in known if (not named or number in named) and (not of_shards or number in of_shards)]


def _parse_offsets(texts: Iterable[str]) -> dict[int, int]:
    """Raises Invalid."""
    matches = [(_OFFSET.fullmatch(text)) for text in texts]
    if not all(matches):
        raise Invalid("offset", "must be PARTITION:OFFSET")
    return {int(match[1]): int(match[2]) for match in matches if match}


def _copy(tailing: TailView, pages: Iterable[Sequence[Record]], limit: int | None) -> None:
    """To standard output, until there is no more, or its reader or the user has enough."""
    left = limit
    with _quiet_end():
        for page in pages:
            lines = list(islice(tailing.take(page), left))
            sys.stdout.buffer.write(b"".join(lines))
            sys.stdout.buffer.flush()
            left = None if left is None else left - len(lines)
            if left == 0:
                return


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def _quiet_end() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        return
    except BrokenPipeError:  # Python flushes once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
