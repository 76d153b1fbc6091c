"""`schemaless triggers run|list|status|resume|remove`: runs trigger programs, shows them, and what operators do."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from schemaless.cli.actions import recorded
from schemaless.cli.output import add_group, print_json, print_notice, print_table
from schemaless.cli.targets import DatastoreOption, api_command, servers
from schemaless.cli.trigger_workers import SourceFiles, TriggerWorkers
from schemaless.client.client import Client
from schemaless.errors import Invalid, Unavailable
from schemaless.quantity import noun_for, quantity
from schemaless.runtime.extras import Extra, needs
from schemaless.stack.plan import DEFAULT_DATASTORE
from schemaless.stack.processes import ending_with_supervisor

ProgramName = Annotated[str, typer.Argument(help="last part of the module's name")]

ShardsOption = Annotated[list[int] | None, typer.Option("--shard", help="only this shard; may be given several times")]


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

    parse_start(start or [])
    sources = SourceFiles(module) if watch else None
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
    followers = quantity(workers, "worker")
    print_notice(f"{datastore} is followed by {followers} of {module}. Ctrl-C ends that after the calls in flight")
    raise typer.Exit(TriggerWorkers(lambda: subprocess.Popen(command), workers, sources).run())


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
    if document["reason"] and document["state"] in ("paused", "tripped"):
        print(document["reason"])
    counts = ", ".join(f"{number} {name}" for name, number in document["counts"].items())
    print(f"cells: {counts}")
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
    for cluster, why in document.get("masters_away", {}).items():  # an older API has none
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
        return str(program["state"])
    return "nobody runs it" if program["state"] == "running" else f"{program['state']}, and nobody runs it"


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
    for cell in worker["failing"]:
        tried = f"attempt {cell['attempt']} of {cell['attempts']} failed, the next one is at {cell['again_at']}"
        print(f"{cell['trigger']} fails on {cell['cell']} at {cell['location']}: {tried}")
        print(textwrap.indent(cell["error"].rstrip(), "  "))
    if (more := worker["failing_count"] - len(worker["failing"])) > 0:
        print(f"and {quantity(more, 'more cell')} failing")
    if (call := worker["oldest_call"]) is not None:
        print(f"shard {call['shard']}: {call['trigger']} on {call['cell']} has run for {call['age_s']} s")


@api_command
def pause(
    client: Client,
    as_json: bool,
    program: ProgramName,
    shard: ShardsOption = None,
    reason: Annotated[str | None, typer.Option(help="shown in its status")] = None,
) -> None:
    """Call nothing of a program, or of some shards, until it is resumed."""
    document = client.program(program).pause(shard or (), reason)
    if as_json:
        print_json(document)
        return
    print(f"{program} pauses" + (f" in {quantity(len(shard), 'shard')}" if shard else ""))
    _print_unreached(document)


@api_command
def resume(client: Client, as_json: bool, program: ProgramName, shard: ShardsOption = None) -> None:
    """Let what was paused, and shards that had stopped, run again. They begin with the cell where they stopped."""
    document = client.program(program).resume(shard or ())
    if as_json:
        print_json(document)
        return
    print(f"resumed: {quantity(document['stopped'], 'stopped shard')}, {quantity(document['paused'], 'paused shard')}")
    _print_unreached(document)


@api_command
def seek(
    client: Client,
    as_json: bool,
    program: ProgramName,
    to: Annotated[list[str], typer.Argument(help="beginning, end, a time, or SHARD:GENERATION:ADDED_ID")],
    shard: ShardsOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only say what would come again")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="don't ask")] = False,
) -> None:
    """Move a program's checkpoints: cells after the new place are called again, those before it are passed over."""
    chosen = client.program(program)
    plan = chosen.seek(to, shard or (), dry_run=True)
    if not as_json:
        cells, shards = quantity(plan["again"], "cell"), quantity(len(plan["shards"]), "shard")
        print(f"{cells} to come again, {plan['passed']} to be passed over, in {shards}")
    if not dry_run:
        if not yes:
            if as_json:
                raise Invalid("--json", "needs --dry-run or --yes, because nobody can be asked")
            typer.confirm("move the checkpoints?", abort=True)
        plan = chosen.seek(to, shard or ())
    if as_json:
        print_json(plan)
    elif not dry_run:
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
