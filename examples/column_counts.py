"""column_counts: how many cells each column of a datastore has, kept in SQLite, exact whatever kills the process.

    python -m examples.column_counts --datastore mezzanine --database counts.db

The effect (counts) and the position of each shard are written in one transaction, so what was counted is never counted
again and nothing is left out: effectively once. Any database that has transactions will do.
"""

from __future__ import annotations

import argparse
import signal
import sqlite3
import sys
from collections import Counter
from pathlib import Path

from schemaless import Batch, Position, Subscriber, kafka_address

TABLES = """
CREATE TABLE IF NOT EXISTS counts (
    shard INTEGER, column_name TEXT, cells INTEGER NOT NULL, PRIMARY KEY (shard, column_name));
CREATE TABLE IF NOT EXISTS positions (
    shard INTEGER PRIMARY KEY, generation INTEGER NOT NULL, added_id INTEGER NOT NULL, topic_offset INTEGER,
    digest INTEGER);
"""
ADD = """
INSERT INTO counts VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET cells = cells + excluded.cells
"""
MOVE = """
INSERT INTO positions VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE
SET generation = excluded.generation, added_id = excluded.added_id, topic_offset = excluded.topic_offset,
    digest = excluded.digest
WHERE generation = ? AND added_id = ?
"""


class Counts:
    """The counts of one datastore."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path)
        self._db.executescript(TABLES)

    def positions(self) -> dict[int, Position]:
        return {row[0]: Position(*row) for row in self._db.execute("SELECT * FROM positions")}

    def by_column(self) -> dict[str, int]:
        return dict(self._db.execute("SELECT column_name, SUM(cells) FROM counts GROUP BY 1 ORDER BY 1"))

    def add(self, batch: Batch) -> None:
        """The effect and the position, or neither. Another process that counts into the same file is found out."""
        columns = Counter(cell.column_name for cell in batch.cells)
        place, after = batch.position, batch.after
        with self._db:
            self._db.executemany(ADD, [(batch.shard, name, cells) for name, cells in columns.items()])
            moved = self._db.execute(
                MOVE,
                (
                    *(place.shard, place.generation, place.added_id, place.offset, place.digest),
                    *(after.generation, after.added_id),
                ),
            )
            if not moved.rowcount:
                raise SystemExit(f"column_counts: another process has moved shard {batch.shard}")

    def forget(self, shard: int) -> None:
        """A part of the shard's history was superseded: it is counted anew, from its beginning."""
        with self._db:
            self._db.execute("DELETE FROM counts WHERE shard = ?", (shard,))
            self._db.execute("DELETE FROM positions WHERE shard = ?", (shard,))


def follow(kafka: str, datastore: str, counts: Counts) -> bool:
    """Counts until it has to stop. Returns True if a shard was reset: begin again from what is stored."""
    with Subscriber(kafka, datastore, positions=counts.positions()) as subscriber:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: subscriber.stop())
        for batch in subscriber:
            if batch.change is not None and batch.change.superseded:
                counts.forget(batch.shard)
                return True
            counts.add(batch)
    return False


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.column_counts")
    parser.add_argument("--kafka", help="default: SCHEMALESS_KAFKA, else the embedded stack's")
    parser.add_argument("--datastore", required=True)
    parser.add_argument("--database", type=Path, required=True)
    arguments = parser.parse_args()
    counts = Counts(arguments.database)
    while follow(kafka_address(arguments.kafka), arguments.datastore, counts):
        pass
    for column, cells in counts.by_column().items():
        print(column, cells)
    return 0


if __name__ == "__main__":
    sys.exit(main())
