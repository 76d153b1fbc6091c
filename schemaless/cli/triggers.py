"""`schemaless triggers run|list|status|resume|remove`: runs trigger programs, shows them, and what operators do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Protocol

import typer

from schemaless.cli.calls import call_command
from schemaless.cli.output import add_group, print_json, print_notice, print_table, print_would
from schemaless.cli.targets import DatastoreOption, api_command, recorded, servers
from schemaless.client.client import Client
from schemaless.contract import programs
from schemaless.error_text import error_summary
from schemaless.errors import Invalid, Misconfigured, Unavailable
from schemaless.quantity import noun_for, quantity
from schemaless.runtime.extras import Extra, needs
from schemaless.stack.plan import DEFAULT_DATASTORE
from schemaless.stack.supervision import ending_with_supervisor

ProgramName = Annotated[str, typer.Argument(help="last part of the module's name")]


def register(app: typer.Typer) -> None:
    add_group(
        app,
        "triggers",
        "Run and supervise trigger programs.",
        {
            "run": run,
            "list": list_all,
            "status": status,
            "doubts": doubts,
            "pause": pause,
            "resume": resume,
            "seek": seek,
            "remove": remove,
        },
    )


@needs("triggers run", Extra.TRIGGERS)
def run(
    module: Annotated[str, typer.Argument(help="dotted module, or a .py file")],
    datastore: DatastoreOption = DEFAULT_DATASTORE,
    workers: Annotated[int, typer.Option(min=1, max=64, help="how many processes share the partitions")] = 1,
    start: Annotated[
        list[str] | None,
        typer.Option(
            "--from",
            help="where shards without a checkpoint start: beginning, end, a time,"
            " or SHARD:GENERATION:ADDED_ID, which may be given several times",
        ),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="start again when a source file changes")] = False,
    name: Annotated[
        str | None, typer.Option(help="of the program and its checkpoints; default: the last part of the module's name")
    ] = None,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="continue where another program of this name stopped")
    ] = False,
) -> None:
    """Run a trigger program until Ctrl-C. A worker that dies is started again."""
    from schemaless.consume.start_at import parse_start
    from schemaless.runtime.outputs import wait_for_nobody

    parse_start(start or [])
    sources = SourceFiles(module) if watch else None
    wait_for_nobody()  # a notice that nobody reads would keep workers from being started again
    reached = servers()
    try:
        reached.datastore(datastore)
    except Unavailable as error:
        print_notice(f"waiting for the storage servers: {error}")
    environment = [f"{name}={value}" for name, value in reached.worker_settings().items()]
    worker = [sys.executable, "-m", "schemaless.consume.trigger_worker", module]
    begin = [part for text in start or [] for part in ("--from", text)]
    identity = [*(["--name", name] if name else []), *(["--take-over"] if take_over else [])]
    command = ending_with_supervisor(["env", *environment, *worker, "--datastore", datastore, *begin, *identity])
    started = "starting" if workers == 1 else f"starting {workers} workers of"
    print_notice(f"{started} {module} on {datastore}. Ctrl-C ends it after the calls in flight")
    if status := TriggerWorkers(lambda: subprocess.Popen(command), workers, sources).run():
        print_notice(f"{module} couldn't start: its output says why")
    raise typer.Exit(status)


@api_command
def list_all(client: Client, as_json: bool) -> None:
    """List the trigger programs of a datastore with their lag."""
    document = client.document("/triggers")
    if as_json:
        print_json(document)
        return
    rows = [
        (
            each["program"],
            _state(each),
            _cells(each["lag"], document["unknown"]),
            len(each["stopped"]),
            each["worker_count"],
            each["unconfirmed_count"] + each["refused_count"] + each["failing_shards_count"],
            each["failing_count"],
            each["parked"],
            each["oldest_call_s"],
        )
        for each in document["triggers"]
    ]
    columns = (
        "program", "state", "cells behind", "stopped shards", "workers", "waiting shards", "failing cells",
        "parked cells", "oldest call, s",
    )  # fmt: skip
    print_table(columns, rows)
    _print_unheard(document)


@api_command
def status(client: Client, as_json: bool, program: ProgramName) -> None:
    """Show how far behind one program is, why shards stopped or wait, and what its workers do."""
    document = client.document(f"/triggers/{program}")
    if as_json:
        print_json(document)
        return
    cells = f"{_cells(document['lag'], document['unknown'])} {noun_for(document['lag'], 'cell')}"
    behind = f"{cells} ({document['lag_seconds']} s) behind"
    print(f"{document['program']}: {_state(document)}, {behind}, {document['rate']} cells/s")
    if document["reason"] and (document.get("stall") or document["state"] in ("paused", "tripped")):
        print(document["reason"])
    counts = ", ".join(f"{number} {name}" for name, number in document["counts"].items())
    print(f"cells: {counts}")
    if failures := document["failures"]:
        share, causes = sum(failures.values()) / document["calls"], [f"{name} ({n})" for name, n in failures.items()]
        print(f"{share:.0%} of {quantity(document['calls'], 'call')} in ten seconds failed: {', '.join(causes)}")
    if document["parked"]:
        print(f"{quantity(document['parked'], 'parked cell')}, the oldest since {document['oldest_parked_at']}")
    for shard in document["stopped"]:
        print(f"shard {shard['shard']} stopped: {shard['reason']}")
    for worker in document["workers"]:
        print_worker(worker)
    _print_unheard(document)


def _cells(lag: int, unknown: Mapping[str, str]) -> str:
    """What is unknown isn't 0: a cluster that doesn't answer has shards of which nobody can tell."""
    return f"at least {lag}" if unknown else str(lag)


def _print_unheard(document: Mapping[str, Any]) -> None:
    for cluster, why in document["unknown"].items():
        print_notice(f"cluster {cluster}: nothing is known of its shards ({why})")
    for cluster, why in document["masters_away"].items():
        print_notice(f"cluster {cluster}: its master is away, so no checkpoint moves there, and a minion tells ({why})")


@api_command
def doubts(
    client: Client,
    as_json: bool,
    program: ProgramName,
    cursor: Annotated[str | None, typer.Option(help="of the page before")] = None,
) -> None:
    """List the effects of which nobody knows whether they happened, and how each is settled."""
    page = client.program(program).doubts(**({} if cursor is None else {"cursor": cursor}))
    if as_json:
        print_json(page)
        return
    for cell in page["parked"]:
        print(f"{cell['id']} row {cell['row_key']}, since {cell['parked_at']}")
        print(f"  {cell['error'].rstrip()}")
    print(f"{page['count']} doubts" + (f". The next page: --cursor {page['cursor']}" if page["cursor"] else ""))


def _state(program: dict[str, Any]) -> str:
    """Returns the state of a program. Without workers it is no use to say that it runs."""
    if program["worker_count"]:
        return str(program.get("stall") or program["state"])
    return "no worker runs it" if program["state"] == "running" else f"{program['state']}, and no worker runs it"


def print_worker(worker: dict[str, Any]) -> None:
    place = f"{worker['host']}, pid {worker['pid']}"
    more = "" if worker["partitions"] == len(worker["assigned"]) else " and more"
    numbers = f" ({', '.join(map(str, worker['assigned']))}{more})" if worker["assigned"] else ""
    print(f"worker {place}: {quantity(worker['partitions'], 'partition')}{numbers}, {worker['rate']} cells/s")
    print(f"  {worker['transport']}, version {worker['version']}")
    if not worker["is_member"]:
        print("  calls nothing, because it gets no answer from its group: mostly Kafka is away")
    if many := [f"{most} of {name}" for name, most in worker["parallel"].items() if most > 1]:
        print(f"calls at once in a shard: {', '.join(many)}")
    for kind, state in {"unconfirmed": "unconfirmed", "refused": "refused", "failing_shards": "failing"}.items():
        for shard in worker[kind]:
            print(f"shard {shard['shard']} is {state}: {shard['reason']}")
        if (more := worker[f"{kind}_count"] - len(worker[kind])) > 0:
            print(f"and {more} more are {state}")
    causes: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for cell in worker["failing"]:
        causes.setdefault((cell["trigger"], error_summary(cell["error"])), []).append(cell)
    for (function, error), (cell, *others) in causes.items():
        alike = f" and {quantity(len(others), 'more cell')} alike" if others else ""
        tried = f"fails: attempt {cell['attempt']} of {cell['attempts']}" if cell["attempt"] else "waits"
        print(f"{function} on {cell['cell']} at {cell['location']}{alike} {tried}, {error}")
        print(f"  it is called again at {cell['again_at']}")
    if (more := worker["failing_count"] - len(worker["failing"])) > 0:
        print(f"and {quantity(more, 'more cell')} that fail or wait")
    if (call := worker["oldest_call"]) is not None:
        print(f"shard {call['shard']}: {call['trigger']} on {call['cell']} has run for {call['age_s']} s")


@call_command(programs.PAUSE)
def pause(document: dict[str, Any], program: ProgramName, shards: list[int] | None) -> None:
    """Call nothing of a program, or of some shards, until it is resumed."""
    if "would" in document:
        return print_would(document["would"])
    print(f"{program} pauses" + (f" in {quantity(len(shards), 'shard')}" if shards else ""))
    _print_unreached(document)


@call_command(programs.RESUME, without=("reason",))
def resume(document: dict[str, Any], program: ProgramName) -> None:
    """Let what was paused, and shards that had stopped, run again. They begin with the cell where they stopped."""
    was_paused = document["was_paused"]
    resumed = ["the whole program"] if was_paused else []
    resumed += [
        quantity(document[what], f"{what} shard") for what in ("stopped", "paused") if document[what] or not was_paused
    ]
    print(f"{'would be ' if 'would' in document else ''}resumed: {', '.join(resumed)}")
    _print_unreached(document)


@call_command(programs.SEEK, asks="move the checkpoints?")
def seek(document: dict[str, Any], program: ProgramName) -> None:
    """Move a program's checkpoints: cells after the new place are called again, those before it are passed over."""
    cells, shards = quantity(document["again"], "cell"), quantity(len(document["shards"]), "shard")
    print(f"{cells} to come again, {document['passed']} to be passed over, in {shards}")
    if not document["dry_run"]:
        print("ordered: the workers move the checkpoints")


def _print_unreached(document: dict[str, Any]) -> None:
    if document["unreached"]:
        print(f"clusters that don't know it yet: {', '.join(document['unreached'])}")


@needs("triggers remove", Extra.MYSQL)
@recorded("triggers remove")
def remove(
    program: ProgramName,
    datastore: DatastoreOption = DEFAULT_DATASTORE,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only show what would be removed")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="don't ask")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, which needs --dry-run or --yes")] = False,
) -> None:
    """Remove the checkpoints of a program that no worker runs any longer. It begins anew if it is run again."""
    from schemaless.ops.trigger_removal import plan_removal, remove_program, require_no_workers
    from schemaless.storage.pymysql_driver import SyncStorage

    if as_json and not (dry_run or yes):
        raise Invalid("--json", "needs --dry-run or --yes, because nobody can be asked")
    reached = servers()
    found = reached.datastore(datastore)
    with SyncStorage(reached.topology) as storage:
        plan = plan_removal(storage, found, program)
        if not as_json:
            done = f"{quantity(plan.checkpoints, 'checkpoint')}, {quantity(plan.finished, 'cell')} finished"
            print(f"{program}: {done}, {plan.parked} parked")
            print(f"running: {quantity(len(plan.running), 'worker')}" + (". Stop that first" if plan.running else ""))
        if not dry_run:
            require_no_workers(plan)
            if not yes:
                typer.confirm("remove them?", abort=True)
            remove_program(storage, found, plan)
    if as_json:
        counts = {"checkpoints": plan.checkpoints, "finished": plan.finished, "parked": plan.parked}
        counts["workers"] = len(plan.running)
        print_json({"program": program, **counts, "removed": not dry_run})
    elif not dry_run:
        print("removed")


# TriggerWorkers: the processes of `schemaless triggers run`, kept running until SIGTERM or Ctrl-C.
#
# With `--watch` they start again when a source file changes. A program that fails at once then waits for the next
# change.

_RESTART_PAUSE_S = 1.0
_BROKEN_WITHIN_S = 5.0  # a worker that ends so soon after its start would end again
_STOP_TIMEOUT_S = 25.0  # a worker whose end hangs cuts itself off after 20
_POLL_S = 0.2
_FILES_MAX = 5_000


class WorkerProcess(Protocol):
    def poll(self) -> int | None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...
    def wait(self, timeout: float | None = None) -> int: ...


@dataclass(slots=True)
class _Place:
    """One of the workers. Without a process it starts again at `restart_at`, or at the next change of the sources."""

    process: WorkerProcess | None
    began: float
    restart_at: float | None = None


class SourceFiles:
    """The Python files of a module's folder and of those below. Hidden folders and environments aren't looked at."""

    def __init__(self, module: str) -> None:
        """Raises Misconfigured when there is no such file, or when the folder has too many."""
        self._folder = _file_of(module).resolve().parent
        self._seen = self._times()

    def have_changed(self) -> bool:
        """Returns whether one was written, made or deleted since the last call."""
        before, self._seen = self._seen, self._times()
        return before != self._seen

    def _times(self) -> Mapping[str, int]:
        found: dict[str, int] = {}
        for folder, below, names in os.walk(self._folder):
            below[:] = [n for n in below if n[0] != "." and not os.path.exists(os.path.join(folder, n, "pyvenv.cfg"))]
            for name in names:
                if name.endswith(".py"):
                    path = os.path.join(folder, name)
                    try:
                        found[path] = os.stat(path).st_mtime_ns
                    except FileNotFoundError:
                        continue  # an editor replaces it
            if len(found) > _FILES_MAX:
                raise Misconfigured(f"--watch: {self._folder} has more than {_FILES_MAX} Python files")
        return found


def _file_of(module: str) -> Path:
    """Returns the file of a module without importing it."""
    if module.endswith(".py"):
        candidates = [Path(module)]
    else:
        path = Path(*module.split("."))
        bases = ["", *sys.path]
        candidates = [Path(base, file) for base in bases for file in (path.with_suffix(".py"), path / "__init__.py")]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise Misconfigured(f"--watch: there is no file of the module {module}")


class TriggerWorkers:
    """`start` starts one process. `sources` are watched, if given."""

    def __init__(
        self,
        start: Callable[[], WorkerProcess],
        count: int,
        sources: SourceFiles | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._start = start
        self._sources = sources
        self._clock = clock
        self._began = clock()
        self._places = [_Place(start(), self._began) for _ in range(count)]
        self._stopping = False

    def run(self) -> int:
        """Returns the exit status: that of a worker which can't even start, else 0."""

        def stop(_number: int, _frame: FrameType | None) -> None:
            self._stopping = True

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)
        try:
            while not self._stopping:
                if (status := self.step()) is not None:
                    return status
                time.sleep(_POLL_S)
            return 0
        finally:
            self.stop()

    def step(self) -> int | None:
        """Looks once at every worker and at the sources. Returns the exit status with which the command ends, if so."""
        now = self._clock()
        if self._sources is not None and self._sources.have_changed():
            print("a source file has changed: the workers start again", file=sys.stderr)
            self.stop()
            self._places = [_Place(self._start(), now) for _ in self._places]
            return None
        for place in self._places:
            if place.process is None:
                if place.restart_at is not None and now >= place.restart_at:
                    place.process, place.began = self._start(), now
                continue
            status = place.process.poll()
            if status is None:
                continue
            if self._sources is None and now - self._began < _BROKEN_WITHIN_S:
                return status
            place.process, place.restart_at = None, now + _RESTART_PAUSE_S
            print(f"a worker ended with status {status}: another one starts", file=sys.stderr)
            if self._sources is not None and now - place.began < _BROKEN_WITHIN_S:
                place.restart_at = None
                print("a worker ended at once: it starts again when a source file changes", file=sys.stderr)
        return None

    def stop(self) -> None:
        """Ends all workers, after their last calls."""
        processes = [place.process for place in self._places if place.process is not None]
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        for process in processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
