"""`python -m indexer`: keeps the indexes of every datastore current. Any number of them share the partitions."""

from __future__ import annotations

from indexer.service import IndexerService
from schemaless.config import IndexerSettings, read_settings
from schemaless.consume.process import run_consumer_process


def main() -> None:
    settings = read_settings(IndexerSettings)
    run_consumer_process("indexer", settings, lambda storage: IndexerService(settings, storage).run())


if __name__ == "__main__":
    main()
