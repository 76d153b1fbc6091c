"""EntryPages: the pages of an index query as one run of entries. Pure (no I/O)."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from schemaless.client.answers import EntriesPage, Entry
from schemaless.client.exchange import Flow
from schemaless.client.requests import Requests


class EntryPages:
    """`limit` of the terms is the size of a page. `page` is the last one that was fetched."""

    def __init__(self, requests: Requests, name: str, terms: Mapping[str, Any]) -> None:
        self._requests = requests
        self._name = name
        self._terms = dict(terms)
        self._ready: deque[Entry] = deque()
        self.page: EntriesPage | None = None

    def take(self) -> Entry | None:
        """Returns the next entry that was fetched, or None."""
        return self._ready.popleft() if self._ready else None

    @property
    def at_end(self) -> bool:
        """Whether the last page was fetched."""
        return self.page is not None and self.page.cursor is None

    def fetch(self) -> Flow[None]:
        """Fetches the next page, without entries where `verify` dropped them. Raises what a query raises."""
        page = yield from self._requests.query_index(self._name, self._terms)
        self._terms["cursor"] = page.cursor
        self._ready.extend(page.entries)
        self.page = page
