"""A row on every cluster, such as a token: written to all, read from all, merged, and brought to whoever was away.

- `write_everywhere` writes to every master that can be reached, one at least, and names the others. So a cluster that
  is away keeps nobody from writing.
- Readers ask every cluster, and merge what they hear with `together`, by a rule for which it doesn't matter who answers
  first. So a row is seen while one cluster answers that has it.
- `bring_up` writes what a cluster lacks. So a row may be written again, and changes nothing where a later one is. A
  cluster that is still away is brought up the next time.

Nobody decides which of two writers came first. Where that matters, all of them ask the same master before they write.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

import structlog

from schemaless.errors import SchemalessError, StorageUnavailable
from schemaless.storage.failover import Answers, answers_of_all, first_answer

if TYPE_CHECKING:
    from schemaless.storage.asyncmy_driver import AsyncNode, AsyncStorage


T = TypeVar("T")
K = TypeVar("K")

log = structlog.get_logger()

_NEW_CLUSTERS_S = 0.5


def latest(rows: Iterable[T | None]) -> T | None:
    """Returns the row that counts of what several clusters have: the one that was changed last."""
    return max((row for row in rows if row is not None), key=attrgetter("changed_at"), default=None)


def together(
    answers: Iterable[Mapping[K, T]], merged: Callable[[Any, Any], Any] = lambda *rows: latest(rows)
) -> dict[K, T]:
    """Returns by key what several clusters know. `merged` is the rule for two rows of one key."""
    found: dict[K, T] = {}
    for key, row in ((key, row) for rows in answers for key, row in rows.items()):
        found[key] = merged(found[key], row) if key in found else row
    return found


def after(changed_at: int) -> int:
    """Returns a `changed_at` that counts instead of another, whatever the clocks say."""
    return max(time.time_ns() // 1000, changed_at + 1)


async def read_everywhere(
    storage: AsyncStorage,
    ask: Callable[[AsyncNode], Awaitable[T]],
    tolerated: type[SchemalessError] = StorageUnavailable,
) -> Answers[T]:
    """Asks every cluster: its master or, if that is unreachable, its minions one after another."""

    async def of_cluster(name: str) -> T:
        return (await first_answer((storage.master(name), *storage.minions(name)), ask))[0]

    return await answers_of_all({name: of_cluster(name) for name in storage.topology.clusters}, tolerated=tolerated)


async def write_everywhere(masters: Iterable[AsyncNode], write: Callable[[AsyncNode], Awaitable[None]]) -> list[str]:
    """Writes to all masters. Returns the clusters that are unreachable. Raises StorageUnavailable if all are."""
    answers = await answers_of_all({master.node.cluster: write(master) for master in masters})
    answers.at_least_one()
    return sorted(answers.failures)


async def bring_up(
    storage: AsyncStorage,
    found: Mapping[str, Mapping[K, T]],
    known: Mapping[K, T],
    write: Callable[[AsyncNode, list[T]], Awaitable[None]],
) -> None:
    """Writes to clusters what they lack of the known rows, or have otherwise. `found`: what each has that answered."""
    for cluster, own in found.items():
        if lacking := [row for key, row in known.items() if own.get(key) != row]:
            try:
                await write(storage.master(cluster), lacking)
            except SchemalessError as error:
                log.info("a cluster lacks rows that others have", cluster=cluster, rows=len(lacking), why=str(error))


async def for_each_cluster(storage: AsyncStorage, work: Callable[[str], Coroutine[Any, Any, None]]) -> None:
    """Runs work of each cluster, also of those that come later. It ends when it is cancelled, or one of them fails."""
    begun = set[str]()
    async with asyncio.TaskGroup() as tasks:
        while True:
            for name in storage.topology.clusters.keys() - begun:
                tasks.create_task(work(name))
                begun.add(name)
            await asyncio.sleep(_NEW_CLUSTERS_S)
