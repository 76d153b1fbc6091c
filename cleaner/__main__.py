"""`python -m cleaner`: one cleaner process. Any number of cleaners may run at once."""

from __future__ import annotations

from cleaner.service import Cleaner
from schemaless.config import CleanerSettings
from schemaless.runtime.lifecycle import run_service


def main() -> None:
    run_service("cleaner", CleanerSettings, lambda settings, storage, stop: Cleaner(storage, settings).run(stop))


if __name__ == "__main__":
    main()
