"""`python -m controller`: one controller process. Any number may run: servers obey the highest ballot only."""

from __future__ import annotations

import asyncio

import structlog

from controller.decide import Hole
from controller.moves import AGAIN_S, SwitchEnder, announced
from controller.service import PERIOD_S, Controller
from schemaless.bus.published import PublishedLocations
from schemaless.bus.turn import Turn
from schemaless.config import ControllerSettings
from schemaless.errors import SchemalessError
from schemaless.runtime.lifecycle import ServiceParts, pause, run_service
from schemaless.storage import appointment_table
from schemaless.storage.appointment_table import OrderState, TopologyOrder
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.everywhere import after, read_everywhere, together, write_everywhere
from schemaless.storage.replica_lag import ReplicaLag
from schemaless.topology import load_topology

log = structlog.get_logger()

SETTLE_TIMEOUT_S = 2.0
PUBLISHED_TIMEOUT_S = 0.3
"""How long the opening of a master waits for Kafka to say that what was read of the progress topics is all."""


async def serve(parts: ServiceParts[ControllerSettings]) -> None:
    storage, loop = parts.storage, asyncio.get_running_loop()

    async def settle(order: TopologyOrder, state: OrderState, told: str) -> None:
        row = order, state, told, after(order.changed_at)
        await write_everywhere(
            storage.masters, lambda node: node.run(appointment_table.settle_order, *row, timeout_s=SETTLE_TIMEOUT_S)
        )

    def settle_from_thread(order: TopologyOrder, state: OrderState, told: str) -> None:
        asyncio.run_coroutine_threadsafe(settle(order, state, told), loop).result()

    published = await asyncio.to_thread(PublishedLocations, parts.settings.kafka)  # it may ask each broker
    controller = Controller(
        load_topology(parts.settings.admin_topology),
        parts.settings.mode,
        services=storage.topology,
        remake_command=parts.settings.remake_command,
        settle=settle_from_thread,
        published=lambda datastores: published.of(datastores, PUBLISHED_TIMEOUT_S),
    )
    controller.holes = lambda: {
        name: Hole(lacks[0], "; ".join(map(str, causes)))
        for name, node in storage.nodes.items()
        for lacks, causes in [node.settings.holes()]
        if lacks
    }
    turn = Turn(parts.settings.kafka)
    ordered: dict[str, TopologyOrder] = {}

    async def keep_reading() -> None:
        while True:
            answers = await read_everywhere(
                storage, lambda node: node.run(appointment_table.orders, timeout_s=1.0), SchemalessError
            )
            ordered.update(together([ordered, *answers.found.values()]))
            await asyncio.sleep(PERIOD_S)

    beside = [
        asyncio.create_task(work)
        for work in (keep_reading(), keep_ending_switches(storage, turn), ReplicaLag(storage).run())
    ]
    try:
        while not parts.stop.is_set():
            turn.take_part(not controller.is_deaf)
            if turn.is_ours:
                await asyncio.to_thread(controller.step, dict(ordered))
            await pause(parts.stop, PERIOD_S)
    finally:
        for task in beside:
            task.cancel()
        controller.close()
        await asyncio.to_thread(turn.close)
        await asyncio.to_thread(published.close)


async def keep_ending_switches(storage: AsyncStorage, turn: Turn) -> None:
    """In another thread than the acts, so that no promotion waits for it."""
    ender = SwitchEnder()
    while True:
        if turn.is_ours:
            try:
                await asyncio.to_thread(ender.step, storage.topology, announced(storage.placements))
            except Exception:
                log.exception("announced switches aren't ended, by a defect")
        await asyncio.sleep(AGAIN_S)


def main() -> None:
    run_service("controller", ControllerSettings, serve)


if __name__ == "__main__":
    main()
