"""Explanations without servers: what is told where clusters are away, and every reason for which a cell waits."""

import asyncio
import uuid

import msgspec
import pytest

from api.explain import explainer
from api.explain.explainer import Explainer
from api.explain.program_standing import ProgramStanding
from api.explain.row_facts import ClusterFacts, HomeFacts, read_cluster, read_home
from api.read.reader import Served
from schemaless.cell import CellKey, row_key_text
from schemaless.errors import CellMissing, StorageUnavailable, Unavailable
from schemaless.location import GenerationStart, Location
from schemaless.position import Position
from schemaless.sharding import shard_of
from schemaless.storage.buffer_table import BufferedCopy
from schemaless.storage.checkpoint_table import Checkpoint, State
from schemaless.storage.parked_table import Cause, ParkedCell
from schemaless.storage.shard_log import RowCell, RowPage
from schemaless.storage.trigger_order_table import NOT_PAUSED, ProgramPause, SeekOrder, TriggerOrders
from schemaless.storage.trigger_program_table import ProgramFunctions
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

    def __init__(self, home, kept=NOTHING_KEPT, copies=(), away=()):
        self.home, self.kept, self.copies, self.away = home, kept, copies, away
        self.gate = asyncio.Event()
        self.gate.set()

    async def read(self, cluster, operation, *args, read_from=None):
        await self.gate.wait()
        if cluster in self.away:
            raise StorageUnavailable(f"{cluster} is away")
        name = operation().gi_code.co_name
        served = Served(Role.MASTER, cluster, 0.0)
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
        "pause": NOT_PAUSED,
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
        ({"pause": ProgramPause(True, None, 1)}, "the program is paused: no reason was given"),
        ({"orders": TriggerOrders(paused={SHARD: "repair"})}, "the shard is paused: repair"),
        ({"orders": TriggerOrders(seeks={SHARD: SeekOrder(Position(SHARD, 1, 2, digest=None), 1)})}, "a seek to 1:2"),
        (
            {"checkpoint": msgspec.structs.replace(CHECKPOINT, state=State.STOPPED, reason="no card")},
            "the shard has stopped: no card",
        ),
        ({"workers": reporting(tripped="TimeoutError")}, "the breaker is open: TimeoutError"),
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
