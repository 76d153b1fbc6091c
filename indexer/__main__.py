"""`python -m indexer`: keeps the indexes of every datastore current. Any number of them share the partitions."""

from __future__ import annotations

from indexer.service import IndexerService
from schemaless.config import IndexerSettings
from schemaless.runtime.lifecycle import cancelled_at, run_service


def main() -> None:
    run_service(
        "indexer",
        IndexerSettings,
        lambda settings, storage, stop: cancelled_at(stop, IndexerService(settings, storage).run()),
    )


if __name__ == "__main__":
    main()
