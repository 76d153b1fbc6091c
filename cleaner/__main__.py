"""`python -m cleaner`: one cleaner process. Any number of cleaners may run at once."""

from __future__ import annotations

from cleaner.metrics import CleanerMetrics
from cleaner.service import Cleaner
from schemaless.config import CleanerSettings
from schemaless.runtime.lifecycle import ServiceParts, run_service


async def serve(parts: ServiceParts[CleanerSettings]) -> None:
    await Cleaner(parts.storage, CleanerMetrics(parts.metrics.registry)).run(parts.stop)


def main() -> None:
    run_service("cleaner", CleanerSettings, serve)


if __name__ == "__main__":
    main()
