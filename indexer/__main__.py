"""`python -m indexer`: keeps the indexes of every datastore current. Any number of them share the partitions."""

from __future__ import annotations

from indexer.service import IndexerService
from schemaless.config import IndexerSettings
from schemaless.consume.metrics import ConsumerMetrics
from schemaless.runtime.lifecycle import cancelled_at, collect_rarely, run_service


def main() -> None:
    collect_rarely()
    run_service(
        "indexer",
        IndexerSettings,
        lambda parts: cancelled_at(
            parts.stop,
            IndexerService(parts.settings, parts.storage, ConsumerMetrics(parts.metrics.registry)).run(),
        ),
    )


if __name__ == "__main__":
    main()
