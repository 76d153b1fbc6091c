"""Explanations without servers: what is told where clusters are away, and every reason for which a cell waits."""

import asyncio
import uuid

import msgspec
import pytest

from api.explain import explainer
from api.explain.explainer import ClusterFacts, Explainer, HomeFacts, ProgramStanding, read_cluster, read_home
from api.read.reader import Served
from schemaless.cell import CellKey, Erased, PutStatus, row_key_text
from schemaless.cli.cells import _event_text
from schemaless.codec import encode_body
from schemaless.errors import CellMissing, StorageUnavailable, Unavailable
from schemaless.location import GenerationStart, Location
from schemaless.names import Stall
from schemaless.position import Position
from schemaless.sharding import shard_of
from schemaless.storage.buffer_table import BufferedCopy
from schemaless.storage.checkpoint_table import Checkpoint, State
from schemaless.storage.diverged_table import DivergedKind, DivergedRow
from schemaless.storage.parked_table import Cause, EndedCell, Ending, ParkedCell
from schemaless.storage.shard_log import RowCell, RowPage
from schemaless.storage.trigger_order_table import ProgramFunctions, ProgramPause, SeekOrder, TriggerOrders
from schemaless.storage.worker_table import OldestCall, WaitingShard, WorkerReport, WorkerRow
from schemaless.topology import Datastore, Role

ROW = uuid.UUID("5b1d5b2e-8d5a-4a3e-9a53-4f0f6a3f2a11").bytes
DATASTORE = Datastore("trips", 2, 1, ("a", "b"))
SHARD = shard_of(ROW, 2)
HOME = DATASTORE.home(SHARD)
(OTHER,) = set(DATASTORE.clusters) - {HOME}
STARTS = [GenerationStart(1, 1)]
COPY = BufferedCopy("BASE", 9, 10, 1_000, None)
NOTHING_KEPT = ClusterFacts([], {}, {}, [], [])


def cell(added_id, ref_key=1, column="BASE"):
    return RowCell(column, ref_key, Location(1, added_id), 1_000 * added_id, 10, None)


def page(*cells):
    return RowPage(cells, earlier=False, later=False)


def home_facts(*cells, head=10, starts=STARTS):
    return HomeFacts(Location(1, head), starts, page(*cells), {}, {}, {}, {})


class Servers:
    """A reader of clusters of which some are away."""

    def __init__(self, home, kept=NOTHING_KEPT, copies=(), away=(), role=Role.MASTER, refused=False):
        self.is_refused = {HOME: refused}.get
        self.home, self.kept, self.copies, self.away, self.role = home, kept, copies, away, role
        self.gate = asyncio.Event()
        self.gate.set()

    async def read(self, cluster, operation, *args, read_from=None):
        await self.gate.wait()
        if cluster in self.away:
            raise StorageUnavailable(f"{cluster} is away")
        name = operation().gi_code.co_name
        served = Served(self.role if cluster == HOME else Role.MASTER, cluster, 0.0)
        if name == read_home.__name__:
            return self.home, served
        assert name == read_cluster.__name__
        copies = self.copies if cluster == OTHER else ()
        return msgspec.structs.replace(self.kept, copies=copies), served


async def explained(servers):
    return (await Explainer(servers, wait_s=0.0).explain(DATASTORE, ROW, 100, None))[0]


async def test_a_home_that_is_away_is_named_and_copies_are_told():
    """What the other clusters know is shown. Nobody can say whether the cell is at home."""
    found = await explained(Servers(None, copies=[COPY], away=[HOME]))
    assert found["unknown"] == {HOME: f"{HOME} is away"}
    ((event),) = found["events"]
    assert (event["kind"], event["cluster"], event["at_home"]) == ("buffered", OTHER, None)
    assert (found["waits"], found["head"]) == ([], None)


OF_MASTER = pytest.mark.parametrize(
    ("role", "refused", "stall"),
    [(Role.MASTER, False, None), (Role.MINION, False, Stall.MASTER_DOWN), (Role.MINION, True, Stall.REFUSED)],
)
"""Who answered for the row's home, and what its master is when a minion did: away, or it refuses our account."""


@OF_MASTER
async def test_a_buffered_cell_says_why_the_master_of_its_home_can_t_be_asked(role, refused, stall):
    """A minion answers then. Otherwise the cell is only on its way."""
    found = await explained(Servers(home_facts(cell(1, 1)), copies=[COPY], role=role, refused=refused))
    (wait,) = found["waits"]
    why = f"it is in the buffer of cluster {OTHER}"
    if stall is not None:
        why = f"{stall}: {why}, and its home's master can't be asked"
    assert (wait["for"], wait["why"]) == ("its home", why)


@OF_MASTER
async def test_a_program_says_why_the_master_of_the_row_s_home_can_t_be_asked(role, refused, stall):
    """Its worker runs, and its calls of the row wait: no checkpoint moves there."""
    worker = WorkerRow("trigger:bill", 1, WorkerReport(), 0.0)
    functions = {"trigger:bill": ProgramFunctions({"BASE": ["bill"]}, "v1")}
    kept = msgspec.structs.replace(NOTHING_KEPT, programs=functions, workers=[worker])
    found = await explained(Servers(home_facts(cell(1)), kept, role=role, refused=refused))
    (program,), (wait, *_) = found["programs"], found["waits"]
    assert program["state"] == (stall or "running")
    assert (f"{stall}: the master of the row's home can't be asked" in wait["why"]) is (stall is not None)


async def test_a_secondary_that_is_away_is_named_and_the_rest_is_told():
    """Copies there may exist: nobody knows."""
    found = await explained(Servers(home_facts(cell(1)), away=[OTHER]))
    assert (found["unknown"], len(found["events"])) == ({OTHER: f"{OTHER} is away"}, 1)


async def test_a_row_that_nobody_shows_is_missing_only_if_all_were_asked():
    """404 is a promise."""
    with pytest.raises(CellMissing, match=row_key_text(ROW)):
        await explained(Servers(home_facts()))
    with pytest.raises(StorageUnavailable, match="is away"):
        await explained(Servers(home_facts(), away=[OTHER]))


LOST = DivergedRow("a1", 5, DivergedKind.CELL, SHARD, "BASE", 3, 10, 1, 55, None, None, None, 9_000)
SECOND_COPY = msgspec.structs.replace(
    LOST,
    kind=DivergedKind.BUFFER,
    generation=0,
    added_id=0,
    outcome=PutStatus.STORED,
    home_generation=7,
    home_added_id=56,
)


async def test_what_only_a_former_master_had_is_told():
    """Also of a row that has no other cell. A second copy had no place there."""
    kept = msgspec.structs.replace(NOTHING_KEPT, diverged=[LOST])
    first, second = (await explained(Servers(home_facts(), kept)))["events"]
    assert first == second  # both clusters of this test have it
    told = [first[name] for name in ("kind", "server", "epoch", "location", "outcome", "stored_at")]
    assert told == ["diverged", "a1", 5, f"{SHARD}:1:55", None, None]
    kept = msgspec.structs.replace(NOTHING_KEPT, diverged=[SECOND_COPY])
    event, _ = (await explained(Servers(home_facts(), kept)))["events"]
    assert (event["location"], event["outcome"], event["stored_at"]) == (None, "stored", f"{SHARD}:7:56")


async def test_explanations_at_once_are_bounded():
    """M5: a process reads for sixteen at a time. The next one is told so, and its turn comes after one of them."""
    servers = Servers(home_facts(cell(1)))
    servers.gate.clear()
    shared = Explainer(servers, wait_s=0.0)
    running = [
        asyncio.create_task(shared.explain(DATASTORE, ROW, 100, None)) for _ in range(explainer.EXPLAINED_AT_ONCE)
    ]
    await asyncio.sleep(0)
    with pytest.raises(Unavailable, match="16 explanations are under way"):
        await shared.explain(DATASTORE, ROW, 100, None)
    servers.gate.set()
    await asyncio.gather(*running)
    assert (await shared.explain(DATASTORE, ROW, 100, None))[0]["events"]


RECORD = ParkedCell(SHARD, 1, 3, ROW, "BASE", 1, "bill", Cause.WAITING, True, "ValueError: x", 2, [5, 6], "v1", 7)
WORKER = WorkerRow("trigger:billing", 7, WorkerReport(), 1.0)
CHECKPOINT = Checkpoint("trigger:billing", Position(SHARD, 1, 5, digest=None), 0, 5, 1, State.RUNNING, None, 9)


def standing(*cells, **more):
    given = {
        "checkpoint": CHECKPOINT,
        "records": (),
        "ended": (),
        "functions": ProgramFunctions({"BASE": ["bill"]}, "v1"),
        "orders": TriggerOrders(),
        "workers": [WORKER],
        "home": home_facts(*cells),
    }
    return ProgramStanding("billing", ROW, SHARD, **{**given, **more})


def why(*cells, **more):
    (found,) = standing(*cells, **more).view()["unfinished"]
    return found["why"]


def reporting(**report):
    return [msgspec.structs.replace(WORKER, report=WorkerReport(**report))]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, "2 cells of its shard before it"),
        ({"workers": []}, "nobody runs the program"),
        ({"checkpoint": None}, "the program has not begun this shard"),
        ({"orders": TriggerOrders(ProgramPause(True, None, 1))}, "the program is paused: no reason was given"),
        ({"orders": TriggerOrders(paused={SHARD: "repair"})}, "the shard is paused: repair"),
        ({"orders": TriggerOrders(seeks={SHARD: SeekOrder(Position(SHARD, 1, 2, digest=None), 1)})}, "a seek to 1:2"),
        (
            {"checkpoint": msgspec.structs.replace(CHECKPOINT, state=State.STOPPED, reason="no card")},
            "the shard has stopped: no card",
        ),
        ({"workers": reporting(tripped="TimeoutError")}, "the breaker is open: TimeoutError"),
        ({"workers": reporting(stall=Stall.NO_KAFKA, stall_reason="no broker")}, "no_kafka: no broker"),
        (
            {"workers": reporting(refused=(WaitingShard("trigger:billing", SHARD, "not dense"),))},
            "its worker doesn't go on: not dense",
        ),
        (
            {"workers": reporting(oldest_call=OldestCall("bill", str(CellKey(ROW, "BASE", 1)), SHARD, 30.0))},
            "its call of bill has run for 31 s",
        ),
    ],
)
def test_a_cell_that_was_not_reached_says_what_it_waits_for(more, said):
    """Each reason for which nothing is called, and how many cells come first."""
    assert said in why(cell(8), **more)


def test_a_cell_between_attempts_is_told_with_each_of_them():
    """The last attempts have their times. A report of other shards doesn't matter to it."""
    other = reporting(refused=(WaitingShard("trigger:billing", 1 - SHARD, "not dense"),))
    found = standing(cell(3), cell(4, 2), cell(5, 3, "OTHER"), records=[RECORD], workers=other)
    first, second = found.view()["unfinished"]
    assert (first["state"], first["why"]) == ("waiting", "its next attempt is due later, or its call takes long")
    assert (second["state"], found.view()["finished"]) == ("behind", 0)
    assert [(at, event["kind"], event.get("attempt")) for at, event in found.events()] == [
        (5, "failed_call", 1), (6, "failed_call", 2), (7, "waiting", None),
    ]  # fmt: skip


def test_a_cell_that_failed_again_after_a_retry_is_told_with_its_first_park():
    """What both records tell comes once."""
    parked = msgspec.structs.replace(RECORD, cause=Cause.ERROR, job=1)
    again = msgspec.structs.replace(parked, error="KeyError", attempts=1, attempted_at=[5, 6, 9], parked_at=10)
    found = standing(cell(3), records=[again], ended=[EndedCell(parked, Ending.FAILED, 9)])
    assert [(at, event["kind"]) for at, event in sorted(found.events(), key=lambda one: one[0])] == [
        (5, "failed_call"), (6, "failed_call"), (7, "parked"), (9, "failed_call"), (10, "parked"),
    ]  # fmt: skip


def test_a_program_without_a_worker_says_so():
    """Its state is what people ordered."""
    assert (standing(cell(3), workers=[]).view()["state"], standing(workers=[]).view()["reason"]) == (
        "running",
        "no worker runs it",
    )
    assert standing(cell(3)).view()["reason"] is None


def test_a_cell_parked_alone_holds_nothing_behind_it():
    """park='cell': the later cells of the row are finished."""
    alone = msgspec.structs.replace(RECORD, cause=Cause.ERROR, holds_row=False)
    (only,) = standing(cell(3), cell(4, 2), records=[alone]).view()["unfinished"]
    assert only["location"] == f"{SHARD}:1:3"


def test_a_checkpoint_that_is_superseded_counts_up_to_the_next_generation():
    """I13: cells of the new generation are not finished by a checkpoint of the old one."""
    starts = [*STARTS, GenerationStart(2, 4)]
    found = standing(home=home_facts(cell(3), cell(4, 2), starts=starts))
    assert [each["location"] for each in found.view()["unfinished"]] == [f"{SHARD}:1:4"]


async def test_an_erasure_is_told_and_what_it_erased():
    """The entry in the log names how many cells, and each of these names the erasure (I19)."""
    entry = encode_body({"erasure": "0000000000000011", "cells": {"BASE": [1], "STATUS": [1, 2]}})
    stub = RowCell("BASE", 1, Location(1, 1), 1_000, 0, None, Erased(17, 2_000))
    home = home_facts(stub, RowCell("$erase", 1, Location(1, 2), 2_000, len(entry), None, None, entry))
    gone, erasure = (await explained(Servers(home)))["events"]
    assert gone["erased"] == {"erasure": "0000000000000011", "erased_at": "1970-01-01T00:00:00.002000Z"}
    assert (erasure["kind"], erasure["erasure"], erasure["cells"]) == ("erasure", "0000000000000011", 3)
    assert [_event_text(event).partition("  ")[2] for event in (gone, erasure)] == [
        "BASE 1  erased by 0000000000000011",
        "0000000000000011 erased 3 cells",
    ]
