"""A trigger worker that is killed, stopped or halted at any step: every promise holds (I9, I10, I12).

The steps are events of the code, before, during and after a call, between effect, park and checkpoint, live and within
a replay. A run has some scenes beside each other, each with a program and two workers of its own, over the same cells.
Which scenes, transports and kinds of functions are drawn with the seed. `make faults` plays all. One judge knows the
promises only.
"""

import os
import signal
import time
import uuid
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest

from schemaless import Client
from schemaless.bus.topics import ensure_topics
from schemaless.sharding import shard_of
from schemaless.storage.pymysql_driver import SyncStorage
from schemaless.topology import Datastore
from tests.consumer_harness import ConsumerProcess, heads, reached, running_consumer, write_program
from tests.faults.halting_worker import LIVE_STEPS, REPLAY_STEPS
from tests.faults.trigger_checker import TriggerChecker
from tests.integration.api.api_harness import api_process
from tests.log_harness import running_tailers
from tests.seed import seeded
from tests.waiting import until

LONG = bool(os.environ.get("SCHEMALESS_FAULTS_LONG"))
pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

SIGNALS = ("SIGKILL", "SIGTERM", "SIGSTOP")
AT_ONCE = 4 if LONG else 3
SHARDS, ROWS, POISON_ROWS, VERSIONS = 4, 20, 4, 3

PROGRAM = """
import asyncio, os, pathlib, time
from examples.call_log import CallLog
from schemaless import RetryPolicy, trigger

HERE = pathlib.Path(os.environ["SCENE_DIR"])
CALLS = CallLog(HERE / "calls")

def note(what, cell):
    CALLS.add(what, str(cell.row_key), str(cell.ref_key), str(time.monotonic_ns()))

def work(cell):
    if (HERE / "down").exists():
        raise ConnectionError("the provider is down")
    if cell.body["is_poison"] and not (HERE / "repaired").exists():
        raise ValueError("poison")

@trigger(column="BASE", retry=RetryPolicy(attempts=int(os.environ["ATTEMPTS"]), delay=0.4, backoff=1), max_age=1800)
"""
FUNCTIONS = (
    """
def call(cell):
    note("begin", cell)
    time.sleep(0.005)
    work(cell)
    note("end", cell)
""",
    """
async def call(cell):
    note("begin", cell)
    await asyncio.sleep(0.005)
    work(cell)
    note("end", cell)
""",
)


def all_scenes() -> list[tuple[str, str, bool]]:
    """Signal, step, and whether it is a step of a replay. Three have a story of their own."""
    found = [(sign, step, False) for sign in SIGNALS for step in LIVE_STEPS]
    found += [(sign, step, True) for sign in SIGNALS for step in REPLAY_STEPS]
    seeded("scenes of workers").shuffle(found)
    others = [("CLOCK", "after the call", False), ("rebalance", "", False), ("outage", "", False)]
    seeded("other scenes of workers").shuffle(others)
    for place, other in zip(range(0, len(found), AT_ONCE), others, strict=False):
        found.insert(place, other)
    return found


SCENES = all_scenes()


@dataclass
class Scene:
    """One program, with the worker that halts and the one that goes on."""

    sign: str
    step: str
    in_replay: bool
    name: str
    folder: Path
    checker: TriggerChecker
    halting: ConsumerProcess
    other: ConsumerProcess

    def file(self, name: str) -> Path:
        return self.folder / name

    def has_fired(self) -> bool:
        return not self.file("armed").exists()

    def __str__(self) -> str:
        return f"{self.sign} {self.step}{' in a replay' if self.in_replay else ''}"


@dataclass
class Play:
    """The scenes of one run, and what they share."""

    storage: SyncStorage
    datastore: Datastore
    client: Client
    chance: Random
    scenes: list[Scene] = field(default_factory=list)

    def begin(self, stack: ExitStack, script: tuple[str, str, bool], folder: Path, **settings: object) -> None:
        sign, step, in_replay = script
        name = f"scene_{len(self.scenes)}"
        program = write_program(folder, name, PROGRAM + self.chance.choice(FUNCTIONS))
        settings |= {"transport": self.chance.choice(["plain", "faust"]), "parallel": self.chance.choice([1, 4])}
        # Kills from outside are no fault of the cells that they meet.
        settings |= {"session_timeout_s": 1.0, "kills_max": 1000}
        arguments = [program, "--datastore", self.datastore.name]
        ordinary = ["consumers", *arguments]
        halting = ["tests.faults.halting_worker", step, sign, str(folder / "armed"), *arguments] if step else ordinary
        # With few rows, an outage is seen only after some time: shards and workers don't begin together.
        environment = {"SCENE_DIR": str(folder), "ATTEMPTS": "12" if sign == "outage" else "3"}
        workers = [
            stack.enter_context(running_consumer(command, settings, environment)) for command in (halting, ordinary)
        ]
        checker = TriggerChecker(self.storage, self.datastore, name, "BASE", self.client, folder / "calls")
        self.scenes.append(Scene(sign, step, in_replay, name, folder, checker, *workers))

    def put(self) -> None:
        """New rows in every shard, some of which have a first version that fails."""
        rows = [(self._row_in(n % SHARDS), n < POISON_ROWS) for n in range(ROWS)]
        for version in range(1, VERSIONS + 1):
            self.chance.shuffle(rows)
            self.client.put_cells(
                [(row, "BASE", version, {"is_poison": is_poison and version == 1}) for row, is_poison in rows]
            )

    def _row_in(self, shard: int) -> uuid.UUID:
        while True:
            row = uuid.UUID(int=self.chance.getrandbits(128))
            if shard_of(row.bytes, SHARDS) == shard:
                return row

    def until(self, holds, scene: Scene | None = None) -> None:
        until(holds, lambda: (scene, {str(one): self.client.program(one.name).status() for one in self.scenes}))

    def halt(self, scenes: list[Scene]) -> None:
        """Waits until each has reached its step, and does what a supervisor would. Halted ones are woken later."""
        for scene in scenes:
            self.until(scene.has_fired, scene)
            scene.checker.check_finished()
            if scene.sign in ("SIGKILL", "SIGTERM"):
                status = scene.halting.process.wait(30)
                assert status == {"SIGKILL": -signal.SIGKILL, "SIGTERM": 0}[scene.sign], scene
                scene.halting.kill_and_restart()

    def wake(self, scenes: list[Scene], is_over) -> None:
        """Lets halted workers go on, once the other one has finished what they had."""
        for scene in scenes:
            if scene.sign == "SIGSTOP":
                self.until(lambda scene=scene: is_over(scene), scene)
                scene.halting.process.send_signal(signal.SIGCONT)

    def has_taken_over(self, scene: Scene) -> bool:
        return reached(self.storage, self.datastore, f"trigger:{scene.name}") == heads(self.storage, self.datastore)

    def check(self, *, parked: int) -> None:
        for scene in self.scenes:
            self.until(scene.checker.is_settled, scene)
            scene.checker.check_finished()
            scene.checker.check_order()
            found = scene.checker.check_status()
            scene.checker.check_all_called(found)
            assert len(found) == parked, (str(scene), found)

    def live(self) -> None:
        """Workers end while they call new cells, or something else happens."""
        scenes = [scene for scene in self.scenes if scene.step and not scene.in_replay]
        for scene in scenes:
            scene.file("armed").touch()
        for scene in self.scenes:
            if scene.sign == "outage":
                scene.file("down").touch()
        self.put()
        for scene in self.scenes:
            if scene.sign == "rebalance":
                come_and_go(self, scene)
            elif scene.sign == "outage":
                outage(self, scene)
        self.halt(scenes)
        self.put()
        self.wake(scenes, self.has_taken_over)

    def replay(self, parked: int) -> None:
        """Workers end while they call again what was parked."""
        scenes = [scene for scene in self.scenes if scene.in_replay]
        for scene in scenes:
            scene.file("armed").touch()
        for scene in self.scenes:
            scene.file("repaired").touch()
            job = self.client.program(scene.name).retry(filter={}, reason="repaired")
            assert job["matched"] == parked
        self.halt(scenes)
        self.put()
        self.wake(scenes, lambda scene: self.has_taken_over(scene) and scene.checker.is_settled())


def come_and_go(play: Play, scene: Scene) -> None:
    """A rebalance under load, again and again: one worker leaves, and comes back."""
    for _ in range(2):
        assert scene.halting.stop() in (0, -signal.SIGTERM)  # it may not listen to SIGTERM yet
        scene.halting.kill_and_restart()
        time.sleep(play.chance.uniform(0.2, 1.0))


def outage(play: Play, scene: Scene) -> None:
    """All calls fail, and a worker is killed meanwhile. Nothing is parked, few calls are made, and all go on alone."""

    def tripped() -> bool:
        return play.client.program(scene.name).status()["state"] == "tripped"

    play.until(tripped, scene)
    scene.halting.kill_and_restart()
    play.until(tripped, scene)
    assert play.client.program(scene.name).status()["parked"] == POISON_ROWS, "an outage parks nothing"
    scene.file("down").unlink()


@pytest.mark.parametrize("part", range(-(-len(SCENES) // AT_ONCE) if LONG else 1))
def test_every_promise_holds_wherever_a_worker_ends(running, kafka, storage, make_datastore, tmp_path, chance, part):
    datastore = make_datastore(shards=SHARDS, partitions=2)
    ensure_topics(kafka, datastore)
    with ExitStack() as stack:
        api = stack.enter_context(api_process(running.path))
        hosts = f"http://127.0.0.1:{api.port}"
        client = stack.enter_context(Client([hosts], datastore=datastore.name))
        stack.enter_context(running_tailers(1, running.path, kafka, datastore))
        play = Play(storage, datastore, client, chance)
        for number, script in enumerate(SCENES[part * AT_ONCE : (part + 1) * AT_ONCE]):
            folder = tmp_path / f"scene {number}"
            folder.mkdir()
            play.begin(stack, script, folder, topology=running.path, kafka=kafka, hosts=hosts)
        play.put()
        play.check(parked=POISON_ROWS)
        play.live()
        play.check(parked=3 * POISON_ROWS)
        play.replay(3 * POISON_ROWS)
        play.check(parked=0)
        for scene in play.scenes:
            scene.halting.stop()
            scene.other.stop()
