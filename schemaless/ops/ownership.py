"""Proves that topics, tailers and databases belong together (I20), before a process joins a group.

A name of a topic, and the id of an installation, are in a copy of the databases, too. So a process challenges the
tailers: it writes a nonce into its databases, and those that read the same ones answer it with their group's offsets.
Where no tailer lives, the challenge that was answered last has to be in the databases: a copy that was made before
doesn't have it, and neither has a backup.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from functools import partial

import structlog

from schemaless.bus.membership import TailersGroup
from schemaless.bus.ownership import require_ours
from schemaless.bus.transport import Transport
from schemaless.errors import AnotherInstallation, StateConflict, Unavailable
from schemaless.storage import challenge_table
from schemaless.storage.asyncmy_driver import AsyncNode, AsyncStorage
from schemaless.storage.everywhere import read_everywhere, write_everywhere
from schemaless.storage.failover import nobody_answers, run_on_all
from schemaless.storage.pymysql_driver import SyncStorage
from schemaless.topology import Datastore, Topology

log = structlog.get_logger()

PATIENCE_S = 20.0
"""For an answer. A tailer that was killed is a member until its session ends."""
_LOOK_S = 0.2
_AGAIN_S = 1.0
_TIMEOUT_S = 5.0


async def prove_ours(storage: AsyncStorage, bootstrap: str, datastore: Datastore) -> None:
    """Returns once the tailers that live, or the last that lived, are proven to read these databases.

    Raises AnotherInstallation, and BusUnavailable or StorageUnavailable where it can't be told now.
    """
    nonce = await challenge(storage, datastore.name)
    group = await asyncio.to_thread(TailersGroup, bootstrap, datastore, timeout_s=_TIMEOUT_S)
    deadline = time.monotonic() + PATIENCE_S
    try:
        while nonce not in (answered := await asyncio.to_thread(group.answered)):
            if not await asyncio.to_thread(group.has_members):
                return await _verify_last(storage, datastore, answered)
            if time.monotonic() > deadline:
                raise AnotherInstallation(
                    f"the tailers of {datastore.topic} don't answer what these databases ask: they read others, of"
                    " which these are a copy, or the other way round, or they hang"
                )
            await asyncio.sleep(_LOOK_S)
    finally:
        await asyncio.to_thread(group.close)


async def challenge(storage: AsyncStorage, datastore: str, answered: str = "") -> str:
    """Asks the tailers something new, and returns it. Forgets what is far older than what they have `answered`.

    Tailers do so themselves, too. So what they answer now isn't in a copy that was made ten seconds ago. Raises
    StorageUnavailable.
    """
    nonce = secrets.token_hex(8)

    async def ask(master: AsyncNode) -> None:
        await master.run(challenge_table.put, datastore, nonce, timeout_s=_TIMEOUT_S)
        if answered:
            await master.run(challenge_table.forget, datastore, answered, timeout_s=_TIMEOUT_S)

    await write_everywhere(storage.masters, ask)
    return nonce


async def _verify_last(storage: AsyncStorage, datastore: Datastore, answered: Sequence[str]) -> None:
    if not answered:
        return
    has_last = partial(challenge_table.has, datastore.name, answered[0])
    answers = await read_everywhere(storage, lambda node: node.run(has_last, timeout_s=_TIMEOUT_S))
    if any(answers.at_least_one()):
        return
    if answers.failures:
        what = f"{', '.join(answers.failures)} may know who tailed {datastore.topic} last"
        raise nobody_answers(answers.failures.values(), what)
    raise AnotherInstallation(
        f"who tailed {datastore.topic} last read other databases: these are a copy of theirs, or a backup. If nothing"
        f" runs on those any more: `schemaless tailer take-over {datastore.name}`"
    )


async def fetch_challenges(storage: AsyncStorage) -> dict[str, list[str]]:
    """Returns by datastore what is asked in these databases, the newest first. Raises StorageUnavailable."""
    answers = await read_everywhere(storage, lambda node: node.run(challenge_table.newest, timeout_s=_TIMEOUT_S))
    rows = {row for found in answers.at_least_one() for row in found}
    known: dict[str, dict[str, None]] = {}
    for _, datastore, nonce in sorted(rows, reverse=True):
        known.setdefault(datastore, {})[nonce] = None
    return {datastore: list(nonces)[: challenge_table.ANSWERED_AT_ONCE] for datastore, nonces in known.items()}


def require_proven(topology: Topology, bootstrap: str, datastore: Datastore) -> None:
    """Does what `prove_ours` does, for callers without an event loop."""

    async def prove() -> None:
        async with AsyncStorage(topology) as storage:
            await prove_ours(storage, bootstrap, datastore)

    require_ours(bootstrap, datastore)
    asyncio.run(prove())


def take_over(storage: SyncStorage, bootstrap: str, datastore: Datastore) -> list[str]:
    """Lets these databases have the topics, whatever was tailed last. Returns the clusters that are unreachable.

    Raises AnotherInstallation for topics of another id, StateConflict while tailers live, BusUnavailable, and
    StorageUnavailable where no master answers.
    """
    require_ours(bootstrap, datastore)
    group = TailersGroup(bootstrap, datastore, timeout_s=_TIMEOUT_S)
    try:
        if group.has_members():
            raise StateConflict(f"tailers of {datastore.topic} run: stop them first, and those of other databases, too")
        away: list[str] = []
        for nonce in group.answered()[:1]:
            answers = run_on_all(storage.masters, challenge_table.put, datastore.name, nonce)
            answers.at_least_one()
            away = list(answers.failures)
        return away
    finally:
        group.close()


async def take_part(transport: Transport, storage: AsyncStorage, bootstrap: str, datastore: Datastore) -> None:
    """Runs a transport once the topics are there and proven to be of these databases.

    Raises AnotherInstallation, and what ends a transport. What is away is waited for.
    """
    said = ""
    while True:
        try:
            if await asyncio.to_thread(require_ours, bootstrap, datastore):
                await prove_ours(storage, bootstrap, datastore)
                break
            why = f"{datastore.topic} isn't there yet: tailers make it"
        except Unavailable as error:
            why = str(error)
        if why != said:
            log.warning("a group isn't joined yet", datastore=datastore.name, why=why)
            said = why
        await asyncio.sleep(_AGAIN_S)
    await transport.run()
