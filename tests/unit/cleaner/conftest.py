"""Fixtures of the cleaner's tests."""

import pytest

from cleaner import service
from tests.unit.cleaner.cleaner_world import PAGE_ROWS


@pytest.fixture(autouse=True)
def small_pages(monkeypatch):
    """Pages of three rows."""
    monkeypatch.setattr(service, "BATCH_ROWS_MAX", PAGE_ROWS)
