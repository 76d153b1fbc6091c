"""Asking several nodes while some are unreachable: the first one that answers (`first_answer`), or all of them.

A node that is unreachable, or that refuses, raises StorageUnavailable. Any other error is an answer, and goes to the
caller at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Generic, TypeVar

from schemaless.errors import SchemalessError, StorageUnavailable
from schemaless.storage.operation import Args, Operation

if TYPE_CHECKING:
    from schemaless.storage.asyncmy_driver import AsyncNode
    from schemaless.storage.pymysql_driver import SyncNode

T = TypeVar("T")
OnFailure = Callable[["AsyncNode", StorageUnavailable], None]


async def first_answer(
    nodes: Iterable[AsyncNode],
    ask: Callable[[AsyncNode], Awaitable[T]],
    *,
    on_failure: OnFailure | None = None,
    nobody: str = "no server can be asked",
) -> tuple[T, AsyncNode]:
    """Asks the nodes one after another. Returns the first answer and the node that gave it.

    Takes the next node out of `nodes` only after the one before failed, and calls `on_failure` in between.
    Raises the last StorageUnavailable when no node answers, and one that says `nobody` when there are no nodes.
    """
    failure: StorageUnavailable | None = None
    for node in nodes:
        try:
            return await ask(node), node
        except StorageUnavailable as error:
            failure = error
            if on_failure is not None:
                on_failure(node, error)
    raise failure or StorageUnavailable(nobody)


class Answers(Generic[T]):
    """The answers of several servers by name, and the errors of those that gave none."""

    def __init__(self) -> None:
        self.found: dict[str, T] = {}
        self.failures: dict[str, SchemalessError] = {}

    def at_least_one(self) -> list[T]:
        """Returns the answers. Raises StorageUnavailable when there is none."""
        if not self.found:
            raise StorageUnavailable("no server answers: " + "; ".join(map(str, self.failures.values())))
        return list(self.found.values())


async def answers_of_all(
    questions: Mapping[str, Awaitable[T]], *, tolerated: type[SchemalessError] = StorageUnavailable
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


def run_on_all(nodes: Iterable[SyncNode], operation: Callable[[*Args], Operation[T]], *args: *Args) -> Answers[T]:
    """Runs an operation on each node in order, for callers without an event loop. Answers are by cluster."""
    answers: Answers[T] = Answers()
    for node in nodes:
        try:
            answers.found[node.node.cluster] = node.run(operation, *args)
        except StorageUnavailable as error:
            answers.failures[node.node.cluster] = error
    return answers
