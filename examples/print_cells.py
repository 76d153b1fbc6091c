"""print_cells: cells of a datastore as they come, with nothing but confluent-kafka and `decode_record`.

    python -m examples.print_cells --datastore mezzanine --group printers --limit 1

The group's offsets are all that is remembered, and nothing is checked: a cell may be printed twice after a crash, and
what retention cut off is never seen. examples/column_counts.py does better.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from confluent_kafka import Consumer

from schemaless import ForeignRecord, FoundCell, decode_record, kafka_address

POLL_S = 0.5


def cells(consumer: Consumer) -> Iterator[FoundCell]:
    """Yields cells. Records that are not ours are named and skipped."""
    while True:
        message = consumer.poll(POLL_S)
        if message is None:
            continue
        if message.error():
            raise SystemExit(f"print_cells: {message.error()}")
        found = decode_record(
            message.value(),
            message.headers(),
            topic=message.topic(),
            partition=message.partition(),
            offset=message.offset(),
        )
        if isinstance(found, FoundCell):
            yield found
        elif isinstance(found, ForeignRecord):
            print(f"passed over: {found}", file=sys.stderr)
        consumer.store_offsets(message)  # after the cell was printed: committed in the background


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.print_cells")
    parser.add_argument("--kafka", help="default: SCHEMALESS_KAFKA, else the embedded stack's")
    parser.add_argument("--datastore", required=True)
    parser.add_argument("--group", required=True)
    parser.add_argument("--limit", type=int, help="end after so many")
    arguments = parser.parse_args()
    consumer = Consumer(
        {
            "bootstrap.servers": kafka_address(arguments.kafka),
            "group.id": arguments.group,
            "isolation.level": "read_committed",  # or records of aborted transactions are printed, too
            "auto.offset.reset": "earliest",
            "enable.auto.offset.store": False,
        }
    )
    consumer.subscribe([f"schemaless.{arguments.datastore}.cells"])
    try:
        for number, cell in enumerate(cells(consumer), start=1):
            print(cell.shard, cell.added_id, cell.column_name, cell.body, flush=True)
            if number == arguments.limit:
                break
    except KeyboardInterrupt:
        pass
    finally:
        consumer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
