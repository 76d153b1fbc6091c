"""Readers of a shard's event stream, and what they saw."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from tests.integration.api.api_harness import ApiProcess, Caller
from tests.waiting import until

EVENTS = {"accept": "text/event-stream"}


@dataclass(frozen=True)
class Event:
    kind: str
    id: str | None
    data: dict[str, Any]

    @property
    def location(self) -> str:
        """The id without its digest."""
        assert self.id is not None
        return ":".join(self.id.split(":")[:2])


class Stream:
    """An open stream. `next` raises httpx.ReadTimeout when nothing comes, StopIteration at its end."""

    def __init__(self, answer: httpx.Response) -> None:
        self.answer = answer
        self.lines = answer.iter_lines()

    def next(self, kind: str | None = None) -> Event:
        """The next event, or the next one of a kind."""
        while True:
            fields = {}
            while line := next(self.lines):
                name, _, value = line.partition(": ")
                fields[name] = value
            event = Event(fields["event"], fields.get("id"), json.loads(fields["data"]))
            if kind in (None, event.kind):
                return event

    def cells(self, count: int) -> list[dict[str, Any]]:
        return [self.next("cell").data for _ in range(count)]

    def added_ids(self, count: int) -> list[int]:
        return [cell["added_id"] for cell in self.cells(count)]


@contextmanager
def following(
    caller: Caller, shard: int = 0, headers: dict[str, str] | None = None, timeout_s: float = 120.0, **query: object
) -> Iterator[Stream]:
    path = f"{caller.prefix}/shards/{shard}/cells"
    params = {"follow": "true", **query}
    wanted = EVENTS | (headers or {})
    with caller.client.stream("GET", path, params=params, headers=wanted, timeout=timeout_s) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"] == "text/event-stream"
        yield Stream(answer)


def metric(api: ApiProcess, name: str) -> float:
    """Of those without labels."""
    lines = api.client.get("/metrics").text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


def wait_for_followers(api: ApiProcess, count: int) -> None:
    until(lambda: followers(api) == count, lambda: followers(api))


def followers(api: ApiProcess) -> float | None:
    return metric(api, "schemaless_api_followers")
