"""A tailer that halts at any step, is taken over and wakes up late is refused: every cell is in the topic once (I7)."""

import signal
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from schemaless.audit.run import audit
from schemaless.topology import Datastore
from tests.faults.halting_tailer import IN_A_TRANSACTION, STEPS, WHILE_OPENING, WHILE_REVOKED
from tests.log_harness import TailerProcess, new_cell, put, running_tailers, wait_for_records
from tests.waiting import until

pytestmark = pytest.mark.faults

REFUSED = "a partition's log failed"
LET_GO = "partitions released"


@dataclass
class Scene:
    """One step: its datastore, the tailer that halts there, and how many cells were written so far."""

    step: str
    datastore: Datastore
    armed: Path
    tailer: TailerProcess
    cells: int = 0
    said_asleep: int = 0
    was_refused: bool = False
    exit_status: int | None = None

    def halted(self) -> bool:
        return self.tailer.halted()

    def wake(self) -> None:
        self.said_asleep = len(self.tailer.said())
        self.tailer.send(signal.SIGCONT)

    def refused(self) -> bool:
        """In the middle of a transaction only the fence can tell; else the group may have been faster."""
        since = self.tailer.said()[self.said_asleep :]
        return REFUSED in since or (self.step not in IN_A_TRANSACTION and LET_GO in since)


class Play:
    """All scenes at once: what takes long is waiting for sessions to end."""

    def __init__(self, running, kafka: str, storage, make_datastore, folder: Path) -> None:
        self._running = running
        self._kafka = kafka
        self._storage = storage
        self._make_datastore = make_datastore
        self._folder = folder
        self.scenes: list[Scene] = []

    def begin(self, stack: ExitStack) -> None:
        for number, step in enumerate(STEPS):
            datastore = self._make_datastore(shards=2, partitions=2)
            armed = self._folder / f"armed-{number}"
            if step in WHILE_OPENING:
                armed.touch()
            module = ("tests.faults.halting_tailer", step, "SIGSTOP", str(armed))
            output = self._folder / f"tailer-{number}"
            arguments = (self._running.path, self._kafka, datastore)
            (tailer,) = stack.enter_context(running_tailers(1, *arguments, module=module, output=output))
            self.scenes.append(Scene(step, datastore, armed, tailer))

    def but(self, *steps: str) -> list[Scene]:
        return [scene for scene in self.scenes if scene.step not in steps]

    def of(self, *steps: str) -> list[Scene]:
        return [scene for scene in self.scenes if scene.step in steps]

    def arm(self, scenes: Iterable[Scene]) -> None:
        for scene in scenes:
            scene.armed.touch()

    def write(self) -> None:
        for scene in self.scenes:
            cells = [new_cell(scene.datastore, shard=shard) for shard in (0, 1) for _ in range(2)]
            put(self._storage, scene.datastore, cells)
            scene.cells += len(cells)

    def await_published(self, scenes: Iterable[Scene]) -> None:
        for scene in scenes:
            wait_for_records(self._kafka, scene.datastore, scene.cells)

    def await_halted(self, scenes: Iterable[Scene]) -> None:
        until(lambda: all(scene.halted() for scene in scenes), lambda: [one.step for one in scenes if not one.halted()])

    def await_refused(self) -> None:
        """What was not refused in time is left to the test of its step."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not all(scene.refused() for scene in self.scenes):
            time.sleep(0.05)
        for scene in self.scenes:
            scene.was_refused = scene.refused()

    def taker(self, stack: ExitStack) -> TailerProcess:
        """One more tailer, for the datastores of all scenes."""
        names = ",".join(scene.datastore.name for scene in self.scenes)
        settings = {"datastores": names, "output": self._folder / "taker"}
        (taker,) = stack.enter_context(
            running_tailers(1, self._running.path, self._kafka, self.scenes[0].datastore, **settings)
        )
        return taker


@pytest.fixture(scope="module")
def scenes(running, kafka, storage, make_datastore, tmp_path_factory):
    """By step, after all of it: halted, taken over, woken, refused, owner again, stopped."""
    play = Play(running, kafka, storage, make_datastore, tmp_path_factory.mktemp("halted"))
    with ExitStack() as stack:
        play.begin(stack)
        play.write()
        play.await_published(play.but(*WHILE_OPENING))
        play.arm(play.but(*WHILE_OPENING, *WHILE_REVOKED))
        play.write()
        play.await_halted(play.but(*WHILE_REVOKED))
        play.arm(play.of(*WHILE_REVOKED))
        taker = play.taker(stack)
        play.write()
        play.await_halted(play.scenes)
        play.write()  # only who takes over can publish these
        play.await_published(play.scenes)
        for scene in play.scenes:
            scene.wake()
        play.write()
        play.await_refused()
        play.await_published(play.scenes)
        assert taker.stop() == 0
        play.write()
        play.await_published(play.scenes)
        for scene in play.scenes:
            scene.tailer.send(signal.SIGTERM)
        for scene in play.scenes:
            scene.exit_status = scene.tailer.process.wait(60)
        yield {scene.step: scene for scene in play.scenes}


@pytest.mark.parametrize("step", STEPS)
def test_who_wakes_up_late_is_refused_and_goes_on(scenes, running, kafka, step):
    """Halted at the step past its session while another one publishes; after its refusal it works again."""
    scene = scenes[step]
    report = audit(running.topology, kafka, scene.datastore, stall_s=5)
    assert report.findings.named == []
    assert report.cells()["matched"] == scene.cells
    assert scene.was_refused
    assert scene.exit_status == 0


@pytest.mark.parametrize("step", STEPS)
def test_every_step_is_written_down(step):
    """The page that explains exactly-once names each interleaving that is forced here."""
    assert step in Path("docs/exactly-once.md").read_text()
