"""`schemaless tailer …`: an operator's view of the tailers, and commands to them (I7, I13)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from schemaless.cli.output import add_group, print_json, print_notice, print_table
from schemaless.cli.targets import JsonOption, recorded, servers
from schemaless.errors import Invalid, Misconfigured, StorageUnavailable
from schemaless.location import parse_location
from schemaless.quantity import quantity
from schemaless.runtime.extras import Extra, needs

if TYPE_CHECKING:
    from schemaless.ops.tailers import GenerationPlan, SeekMove, ShardStatus, TailerStatus
    from schemaless.topology import Datastore

NO_OWNER = "nobody"
_SEEK_TIMEOUT_S = 60.0  # while tailers open their logs again and again
_REWRITE_TIMEOUT_S = 600.0  # of the cells of a generation, in one statement

_SHARDS_NAMED_MAX = 10  # for one cause. With more, the first and the last one stand for all
_EXTRAS = (Extra.KAFKA, Extra.MYSQL)

Name = Annotated[str, typer.Argument(help="name of the datastore")]


def register(app: typer.Typer) -> None:
    add_group(
        app,
        "tailer",
        "Show and control the processes that publish the log to Kafka.",
        {
            "status": status,
            "pause": pause,
            "resume": resume,
            "seek": seek,
            "new-generation": new_generation,
            "take-over": take_over,
        },
    )


@needs("tailer status", *_EXTRAS)
def status(
    datastore: Annotated[str, typer.Argument(help="name of a datastore; default: all")] = "",
    shards: Annotated[bool, typer.Option("--shards", help="show each shard, too")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show how far each shard's published location is behind its head, which tailer owns it, and what blocks it."""
    from schemaless.ops.tailers import read_tailer_status
    from schemaless.storage.pymysql_driver import SyncStorage

    reached = servers()
    wanted = reached.datastores(datastore)
    with SyncStorage(reached.topology) as storage:
        found = [read_tailer_status(storage, reached.kafka, each) for each in wanted]
    if as_json:
        print_json({"datastores": [_document(each, shards) for each in found]})
        return
    for each in found:
        _print_status(each)
        if shards:
            rows = [
                (each.shard, each.partition, each.published or "-", each.head or "-", each.lag, f"{each.lag_s:.1f}")
                for each in each.shards
            ]
            print_table(("shard", "partition", "published", "head", "cells", "oldest, s"), rows)


@needs("tailer pause", *_EXTRAS)
@recorded("tailer pause")
def pause(datastore: Name, as_json: JsonOption = False) -> None:
    """Stop publishing until `resume`. Every tailer obeys within two seconds, and nothing is lost."""
    _set_paused(datastore, paused=True, as_json=as_json)


@needs("tailer resume", *_EXTRAS)
@recorded("tailer resume")
def resume(datastore: Name, as_json: JsonOption = False) -> None:
    """Publish again, from where it was paused."""
    _set_paused(datastore, paused=False, as_json=as_json)


@needs("tailer seek", *_EXTRAS)
@recorded("tailer seek")
def seek(
    datastore: Name,
    location: Annotated[
        str, typer.Argument(help="last published location: ADDED_ID or GENERATION:ADDED_ID; 0 publishes all again")
    ],
    shard: Annotated[int | None, typer.Option(help="number of one shard; default: every shard")] = None,
    repeat: Annotated[bool, typer.Option("--repeat", help="also publish again what the topic has")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only print what would change")] = False,
    as_json: JsonOption = False,
) -> None:
    """Publish again after a location. Skipped cells stay missing in the topic. What it has stays, or comes twice."""
    from schemaless.bus.topics import ensure_topics
    from schemaless.ops.ownership import require_proven
    from schemaless.ops.tailers import announce_seek, move_progress, plan_seek
    from schemaless.storage.pymysql_driver import SyncStorage

    reached = servers()
    found = reached.datastore(datastore)
    shards = list(range(found.shards)) if shard is None else [_verified(found, shard)]
    generation, added_id = parse_location(location, "location")
    require_proven(reached.topology, reached.kafka, found)
    with SyncStorage(reached.topology) as storage:

        def plan() -> Sequence[SeekMove]:
            return plan_seek(storage, reached.kafka, found, shards, generation, added_id)

        moves = plan()
        kept = [] if repeat else [move for move in moves if move.repeats]
        if kept and all(move.is_done or move in kept for move in moves):
            raise Misconfigured(
                f"nothing is moved: behind it the topic has cells of {quantity(len(kept), 'shard')} already, of shard"
                f" {kept[0].to.shard} up to {kept[0].held}",
                hint="they would be in the topic twice. `schemaless audit` says whether it lacks any, and --repeat"
                " publishes them again all the same",
            )
        _print_moves(found.name, moves, kept, as_json=as_json, dry_run=dry_run)
        if dry_run:
            return
        ensure_topics(reached.kafka, found)
        try:
            move_progress(reached.kafka, found, plan, repeat=repeat, timeout_s=_SEEK_TIMEOUT_S)
        finally:
            try:  # the next tailer that publishes notices by itself, an idle one has to be notified
                announce_seek(storage, found.name)
            except StorageUnavailable as error:
                print_notice(f"tailers notice the seek when they publish next: {error}")


@needs("tailer new-generation", *_EXTRAS)
@recorded("tailer new-generation")
def new_generation(
    datastore: Name,
    shard: Annotated[int, typer.Option(help="number of the shard")],
    starts_at: Annotated[
        int | None, typer.Option("--from", help="first added_id that the master lost, if the topic can't tell any more")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only print what would change")] = False,
    as_json: JsonOption = False,
) -> None:
    """Open a new generation of a shard whose master lost published cells. The topic's lost cells are superseded."""
    from schemaless.ops.ownership import require_proven
    from schemaless.ops.tailers import plan_generation
    from schemaless.storage import shard_head
    from schemaless.storage.pymysql_driver import SyncStorage

    reached = servers()
    found = reached.datastore(datastore)
    _verified(found, shard)
    require_proven(reached.topology, reached.kafka, found)
    with SyncStorage(reached.topology, timeout_s=_REWRITE_TIMEOUT_S) as storage:
        plan = plan_generation(storage, reached.kafka, found, shard, starts_at)
        _print_generation(shard, plan, as_json=as_json, dry_run=dry_run)
        if dry_run:
            return
        storage.master(found.home(shard)).run(shard_head.open_generation, found, shard, plan.start)
    if not as_json:
        print("opened: tailers announce it by themselves")


@needs("tailer take-over", *_EXTRAS)
@recorded("tailer take-over")
def take_over(datastore: Name, as_json: JsonOption = False) -> None:
    """Let these databases have a topic that was tailed from others last: they are a backup, and those are gone."""
    from schemaless.ops import ownership
    from schemaless.storage.pymysql_driver import SyncStorage

    reached = servers()
    found = reached.datastore(datastore)
    with SyncStorage(reached.topology) as storage:
        away = ownership.take_over(storage, reached.kafka, found)
    if as_json:
        return print_json({"datastore": found.name, "unreachable": away})
    print(f"{found.topic} is tailed from these databases, once a tailer runs")


def _print_generation(shard: int, plan: GenerationPlan, *, as_json: bool, dry_run: bool) -> None:
    kept = plan.start.starts_at - 1
    if as_json:
        superseded = [{"range": str(lost), "cells": lost.cells} for lost in plan.superseded]
        return print_json(
            {
                "shard": shard,
                "dry_run": dry_run,
                "generation": plan.start.generation,
                "starts_at": plan.start.starts_at,
                "proven": plan.proven,
                "superseded": superseded,
                "again": plan.again,
            }
        )
    print(f"shard {shard}: generation {plan.start.generation} begins at {plan.start.starts_at}")
    print(
        f"  topic and MySQL agree up to {kept}"
        if plan.proven
        else f"  nothing proves that topic and MySQL agree up to {kept}: the topic no longer reaches back"
    )
    for lost in plan.superseded:
        print(f"  superseded in the topic: {lost}, {quantity(lost.cells, 'cell')}")
    print(f"  published again with generation {plan.start.generation}: {quantity(plan.again, 'cell')}")


def _print_moves(
    datastore: str, moves: Sequence[SeekMove], kept: Sequence[SeekMove], *, as_json: bool, dry_run: bool
) -> None:
    if as_json:
        shards = [
            {
                "shard": move.to.shard,
                "from": None if move.before is None else str(move.before),
                "to": str(move.to.location),
                "again": move.again,
                "never": move.never,
                "announced_again": move.announced_again,
                "kept_at": str(move.held) if move in kept else None,
            }
            for move in moves
        ]
        return print_json({"datastore": datastore, "dry_run": dry_run, "shards": shards})
    for move in moves:
        if move in kept:
            print(f"shard {move.to.shard}: stays where it is, because the topic has it up to {move.held} already")
            continue
        print(
            f"shard {move.to.shard}: {move.before or 'no progress'} → {move.to.location}:"
            f" {quantity(move.again, 'cell')} to come again, {move.never} never to come"
            + (
                f", {quantity(move.announced_again, 'generation')} to be announced again"
                if move.announced_again
                else ""
            )
        )


def _verified(datastore: Datastore, shard: int) -> int:
    if not 0 <= shard < datastore.shards:
        raise Invalid("shard", f"must be from 0 to {datastore.shards - 1}")
    return shard


def _set_paused(datastore: str, *, paused: bool, as_json: bool) -> None:
    from schemaless.ops.tailers import set_paused
    from schemaless.storage.pymysql_driver import SyncStorage

    reached = servers()
    found = reached.datastore(datastore)
    with SyncStorage(reached.topology) as storage:
        unreached = set_paused(storage, found.name, paused)
    if as_json:
        print_json({"datastore": found.name, "paused": paused, "unreached": list(unreached)})
        return
    print(f"{found.name}: ordered to {'pause' if paused else 'continue'}. Tailers obey within two seconds")
    for cluster in unreached:
        print(f"the master of cluster {cluster} is unreachable and does not know; the other clusters decide")


def _print_status(status: TailerStatus) -> None:
    print(summary_line(status))
    by_owner: dict[str, list[ShardStatus]] = defaultdict(list)
    for shard in status.shards:
        owner = status.owners.get(shard.partition)
        by_owner[NO_OWNER if owner is None else f"{owner.client} {owner.host}"].append(shard)
    rows = []
    for name, shards in sorted(by_owner.items()):
        lag = _lag(shards)
        partitions = _ranges(sorted({shard.partition for shard in shards}))
        rows.append((name, partitions, lag["shards_behind"], lag["lag"], f"{lag['lag_s']:.1f}"))
    print_table(("tailer", "partitions", "shards behind", "cells", "oldest, s"), rows)
    for line in [*status.stalls, *problem_lines(status.shards)]:
        print(line)


def summary_line(status: TailerStatus) -> str:
    """Says how far a datastore is behind, and of how many shards nobody knows."""
    lag = _lag(status.shards)
    state = "paused: nothing is published until `schemaless tailer resume`" if status.command.paused else "tailed"
    known = len(status.shards) - lag["shards_unknown"]
    return (
        f"{status.datastore.name}: {state}. behind in {lag['shards_behind']} of {quantity(known, 'shard')},"
        f" by {quantity(lag['lag'], 'cell')}, the oldest {lag['lag_s']:.1f} s old"
        + (f". Of {lag['shards_unknown']} more the head isn't known" if lag["shards_unknown"] else "")
    )


def problem_lines(shards: Sequence[ShardStatus]) -> list[str]:
    """Names each cause once, with the shards that have it."""
    by_cause: dict[str, list[int]] = defaultdict(list)
    for shard in shards:
        if shard.problem is not None:
            by_cause[shard.problem].append(shard.shard)
    return [
        f"shard{'s' if found[1:] else ''} {_ranges(found)}: {cause}"
        if len(found) <= _SHARDS_NAMED_MAX
        else f"{len(found)} shards, from {found[0]} to {found[-1]}: {cause}"
        for cause, found in by_cause.items()
    ]


def _document(status: TailerStatus, each_shard: bool) -> dict[str, Any]:
    partitions = []
    for partition in range(status.datastore.partitions):
        owner = status.owners.get(partition)
        named = None if owner is None else {"client": owner.client, "host": owner.host}
        lag = _lag([shard for shard in status.shards if shard.partition == partition])
        partitions.append({"partition": partition, "owner": named} | lag)
    document = {
        "datastore": status.datastore.name,
        "paused": status.command.paused,
        "stalls": list(status.stalls),
        **_lag(status.shards),
        "partitions": partitions,
        "problems": [{"shard": each.shard, "why": each.problem} for each in status.shards if each.problem],
    }
    if each_shard:
        document["shards"] = [
            {
                "shard": shard.shard,
                "partition": shard.partition,
                "published": None if shard.published is None else str(shard.published),
                "head": None if shard.head is None else str(shard.head),
                "lag": shard.lag,
                "lag_s": shard.lag_s,
            }
            for shard in status.shards
        ]
    return document


def _lag(shards: Sequence[ShardStatus]) -> dict[str, Any]:
    """Returns the members of JSON that say how far some shards are behind."""
    return {
        "shards_behind": sum(shard.lag > 0 for shard in shards),
        "shards_unknown": sum(shard.head is None for shard in shards),
        "lag": sum(shard.lag for shard in shards),
        "lag_s": max((shard.lag_s for shard in shards), default=0.0),
    }


def _ranges(numbers: Sequence[int]) -> str:
    """Returns sorted numbers as text, consecutive ones as FIRST-LAST."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return " ".join("-".join(map(str, run)) for run in runs)
