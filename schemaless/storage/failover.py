"""Asking several nodes while some are unreachable: the first one that answers (`first_answer`), or all of them.

Most callers name clusters and an operation. `ask_masters` and `ask_clusters` note who is away, and `all_masters` needs
every master.
A node that is unreachable, or that refuses, raises StorageUnavailable. Any other error is an answer, and goes to the
caller at once. So does ShardsMoved: no node of that cluster is their home.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Generic, TypeVar

from schemaless.errors import AccountRefused, SchemalessError, ShardsMoved, StorageUnavailable
from schemaless.storage.operation import Args, Operation

if TYPE_CHECKING:
    from schemaless.storage.asyncmy_driver import AsyncNode, AsyncStorage
    from schemaless.storage.pymysql_driver import SyncNode

T = TypeVar("T")
ErrorT = TypeVar("ErrorT", bound=SchemalessError)
Tolerated = type[SchemalessError] | tuple[()]
OnFailure = Callable[["AsyncNode", StorageUnavailable], None]


async def first_answer(
    nodes: Iterable[AsyncNode],
    ask: Callable[[AsyncNode], Awaitable[T]],
    *,
    on_failure: OnFailure | None = None,
    skipped: Iterable[Exception] = (),
) -> tuple[T, AsyncNode]:
    """Asks the nodes one after another. Returns the first answer and the node that gave it.

    Takes the next node out of `nodes` only after the one before failed, and calls `on_failure` in between.
    Raises the last StorageUnavailable when no node answers. When there are no nodes it raises one that says why others
    were `skipped`.
    """
    failure: StorageUnavailable | None = None
    for node in nodes:
        try:
            return await ask(node), node
        except ShardsMoved:
            raise
        except StorageUnavailable as error:
            failure = error
            if on_failure is not None:
                on_failure(node, error)
    raise failure or nobody_answers(list(skipped))


def nobody_answers(failures: Collection[Exception], what: str = "no server answers") -> StorageUnavailable:
    """Returns the error of all these failures, of which `what` came. It is an AccountRefused if one of them is."""
    why = f"{what}: {'; '.join(map(str, failures)) or 'none can be asked'}"
    if refused := [failure.shown for failure in failures if isinstance(failure, AccountRefused)]:
        return AccountRefused(why, "; ".join(refused))
    return StorageUnavailable(why)


def without_frames(error: ErrorT) -> ErrorT:
    """Returns a copy of an error to be kept. A traceback, and those of its causes, would keep the rows of a batch."""
    kept = type(error).__new__(type(error), *error.args)
    kept.__dict__.update(error.__dict__)
    return kept


class Answers(Generic[T]):
    """The answers of several servers by name, and the errors of those that gave none."""

    def __init__(self) -> None:
        self.found: dict[str, T] = {}
        self.failures: dict[str, SchemalessError] = {}

    def at_least_one(self) -> list[T]:
        """Returns the answers. Raises StorageUnavailable when there is none."""
        if not self.found:
            raise nobody_answers(self.failures.values())
        return list(self.found.values())


async def answers_of_all(
    questions: Mapping[str, Awaitable[T]], *, tolerated: Tolerated = StorageUnavailable
) -> Answers[T]:
    """Asks all servers concurrently, by name. Answers are in the order of the questions.

    Raises an error that is not `tolerated`, once all servers were asked.
    """
    answers: Answers[T] = Answers()
    results = await asyncio.gather(*questions.values(), return_exceptions=True)
    for name, result in zip(questions, results, strict=True):
        if isinstance(result, tolerated):
            answers.failures[name] = result
        elif isinstance(result, BaseException):
            raise result
        else:
            answers.found[name] = result
    return answers


async def ask_masters(
    storage: AsyncStorage,
    clusters: Iterable[str],
    operation: Callable[[*Args], Operation[T]],
    *args: *Args,
    timeout_s: float | None = None,
    tolerated: Tolerated = SchemalessError,
) -> Answers[T]:
    """Runs an operation on the master of each cluster. Raises an error that is not `tolerated`, once all were asked."""
    questions = {cluster: storage.master(cluster).run(operation, *args, timeout_s=timeout_s) for cluster in clusters}
    return await answers_of_all(questions, tolerated=tolerated)


async def ask_clusters(
    storage: AsyncStorage,
    clusters: Iterable[str],
    operation: Callable[[*Args], Operation[T]],
    *args: *Args,
    timeout_s: float | None = None,
) -> Answers[T]:
    """Runs an operation on one node of each cluster: on the master, or on a minion where the master doesn't answer."""

    async def ask(cluster: str) -> T:
        nodes = [storage.master(cluster), *storage.minions(cluster)]
        answer, _ = await first_answer(nodes, lambda node: node.run(operation, *args, timeout_s=timeout_s))
        return answer

    return await answers_of_all({cluster: ask(cluster) for cluster in clusters}, tolerated=SchemalessError)


async def all_masters(
    storage: AsyncStorage, clusters: Iterable[str], operation: Callable[[*Args], Operation[T]], *args: *Args
) -> dict[str, T]:
    """Runs an operation on the master of each cluster. Raises the first error, once all were asked."""
    return (await ask_masters(storage, clusters, operation, *args, tolerated=())).found


def run_on_all(nodes: Iterable[SyncNode], operation: Callable[[*Args], Operation[T]], *args: *Args) -> Answers[T]:
    """Runs an operation on each node in order, for callers without an event loop. Answers are by cluster."""
    answers: Answers[T] = Answers()
    for node in nodes:
        try:
            answers.found[node.node.cluster] = node.run(operation, *args)
        except StorageUnavailable as error:
            answers.failures[node.node.cluster] = error
    return answers
