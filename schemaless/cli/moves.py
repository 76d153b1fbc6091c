"""`schemaless topology move-shard` and its like: shards move to another cluster while everything runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from schemaless.cli.growth import DryRunOption
from schemaless.cli.interrupts import until_interrupted
from schemaless.cli.output import print_json, print_notice, print_table
from schemaless.cli.targets import JsonOption, recorded, servers
from schemaless.errors import Misconfigured
from schemaless.quantity import quantity
from schemaless.runtime.extras import Extra, needs

if TYPE_CHECKING:
    from schemaless.ops.moves import MoveStep, Told
    from schemaless.storage.pymysql_driver import SyncStorage
    from schemaless.storage.shard_move_table import ShardMove
    from schemaless.topology import Datastore

NameArgument = Annotated[str, typer.Argument(metavar="DATASTORE", help="name of the datastore")]
ShardsArgument = Annotated[str, typer.Argument(help="shards, such as 3, 0-15 or 1,4,9-12")]
LagOption = Annotated[
    int | None, typer.Option("--lag-ms", min=1, help="copying waits while a minion is further behind; default: 2000")
]
CommitOption = Annotated[
    int | None, typer.Option("--commit-ms", min=1, help="copying waits after a commit that took longer; default: 100")
]
_SAID_EVERY_S = 5.0

Order = Callable[["SyncStorage", "Datastore", Sequence[int], "Told"], None]


@needs("topology move-shard", Extra.KAFKA, Extra.MYSQL)
@recorded("topology move-shard")
def move_shard(
    name: NameArgument,
    shards: ShardsArgument,
    cluster: Annotated[str, typer.Argument(help="the storage cluster that gets them")],
    lag_ms: LagOption = None,
    commit_ms: CommitOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Move shards to another cluster. Puts wait for some milliseconds at the switch, and none fails."""
    from schemaless.ops.move_orders import move_shards, parse_shards, plan_move
    from schemaless.storage.pymysql_driver import SyncStorage

    reached = servers()
    datastore = reached.datastore(name)
    with SyncStorage(reached.topology) as storage:
        wanted = parse_shards(shards, datastore)
        plan = plan_move(storage, datastore, wanted, cluster)
        size = f"{quantity(len(wanted), 'shard')} of {name}, {plan.size_bytes / (1 << 20):.1f} MiB"
        if not plan.fits:
            print_notice(f"{size}: look whether each server of {cluster} has twice as much left on its disk")
        if dry_run:
            sources = ", ".join(sorted(set(plan.sources.values())))
            _print(f"{size}, would move from {sources} to {cluster}: nothing was changed", as_json)
            return
        move_shards(storage, datastore, plan, cluster, _progress(), lag_max_ms=lag_ms, commit_max_ms=commit_ms)
    _print(
        f"{size}, live on {cluster} now. `schemaless topology reverse {name} {shards}` takes them back. Until then"
        " `move-follow` keeps the former home up to date. `topology complete` ends that, and drops what lies there",
        as_json,
    )


@needs("topology moves", Extra.KAFKA, Extra.MYSQL)
def list_moves(
    name: Annotated[str, typer.Argument(metavar="[DATASTORE]", help="name of the datastore; default: all")] = "",
    as_json: JsonOption = False,
) -> None:
    """List shards that move, and those that moved: how far they are, how fast, and how long their switch took."""
    from schemaless.ops.move_orders import arrivals
    from schemaless.storage.pymysql_driver import SyncStorage

    with SyncStorage(servers().topology) as storage:
        documents = [_document(one.move) for one in arrivals(storage, name)]
    if as_json:
        print_json({"moves": documents})
    else:
        columns = (
            "datastore",
            "shard",
            "from",
            "to",
            "state",
            "copied",
            "head",
            "cells_s",
            "eta_s",
            "pause_ms",
            "told",
        )
        print_table(columns, [[document[column] for column in columns] for document in documents])


@needs("topology move-throttle", Extra.KAFKA, Extra.MYSQL)
@recorded("topology move-throttle")
def move_throttle(
    name: NameArgument,
    shards: ShardsArgument,
    lag_ms: LagOption = None,
    commit_ms: CommitOption = None,
    as_json: JsonOption = False,
) -> None:
    """Change when copying waits, also of moves that run."""
    from schemaless.ops.move_orders import parse_shards, throttle
    from schemaless.storage.pymysql_driver import SyncStorage

    given = {"lag_max_ms": lag_ms, "commit_max_ms": commit_ms}
    limits = {limit: value for limit, value in given.items() if value is not None}
    if not limits:
        raise Misconfigured("nothing would be changed: give --lag-ms or --commit-ms")
    reached = servers()
    datastore = reached.datastore(name)
    with SyncStorage(reached.topology) as storage:
        count = throttle(storage, datastore, parse_shards(shards, datastore), limits)
    _print(f"{quantity(count, 'move')} of {name} take these limits within a second", as_json)


@needs("topology move-follow", Extra.KAFKA, Extra.MYSQL)
@recorded("topology move-follow")
def move_follow(name: NameArgument, shards: ShardsArgument, as_json: JsonOption = False) -> None:
    """Copy to the former home what is written, until you end it. Then a reversal takes about a second."""
    from schemaless.ops.move_orders import follow

    with until_interrupted():
        _carried_out(name, shards, partial(follow, over=lambda: False))
    _print(f"shards {shards} of {name} aren't followed any more", as_json)


@needs("topology reverse", Extra.KAFKA, Extra.MYSQL)
@recorded("topology reverse")
def move_reverse(name: NameArgument, shards: ShardsArgument, as_json: JsonOption = False) -> None:
    """Take shards back to where they came from, with all that was written since."""
    from schemaless.ops.move_orders import reverse

    _carried_out(name, shards, reverse)
    _print(f"shards {shards} of {name} live where they came from", as_json)


@needs("topology complete", Extra.KAFKA, Extra.MYSQL)
@recorded("topology complete")
def move_complete(name: NameArgument, shards: ShardsArgument, as_json: JsonOption = False) -> None:
    """Drop the cells of shards at their former home. They can't be reversed then."""
    from schemaless.ops.move_orders import complete

    _carried_out(name, shards, complete)
    _print(f"shards {shards} of {name} are dropped at their former home", as_json)


@needs("topology move-cancel", Extra.KAFKA, Extra.MYSQL)
@recorded("topology move-cancel")
def move_cancel(name: NameArgument, shards: ShardsArgument, as_json: JsonOption = False) -> None:
    """End moves that aren't switched, and drop what they copied."""
    from schemaless.ops.move_orders import cancel

    _carried_out(name, shards, cancel)
    _print(f"shards {shards} of {name} stay where they are", as_json)


def _print(told: str, as_json: bool) -> None:
    print_json({"told": told}) if as_json else print(told)


def _carried_out(name: str, shards: str, order: Order) -> None:
    from schemaless.ops.move_orders import parse_shards
    from schemaless.storage.pymysql_driver import SyncStorage

    reached = servers()
    datastore = reached.datastore(name)
    with SyncStorage(reached.topology) as storage:
        order(storage, datastore, parse_shards(shards, datastore), _progress())


def _progress() -> Told:
    """Returns who tells of each step, and now and then of pages."""
    from schemaless.ops.moves import MoveStep

    said_at = 0.0

    def told(step: MoveStep, move: ShardMove) -> None:
        nonlocal said_at
        now = time.monotonic()
        if step is MoveStep.PAGE and now - said_at < _SAID_EVERY_S:
            return
        said_at = now
        if text := _said(step, move):
            print_notice(f"shard {move.shard}: {text}")

    return told


def _said(step: MoveStep, move: ShardMove) -> str:
    from schemaless.ops.moves import MoveStep

    way = f"{move.source} to {move.target}"
    match step:
        case MoveStep.BEGUN:
            return f"{way}, {move.state}"
        case MoveStep.PAGE:
            return f"{move.copied} of {move.head} cells, {move.cells_s} cells/s, {_eta_s(move)} s left"
        case MoveStep.CUT:
            return f"a generation was opened on {move.source}: cells behind {move.copied} are copied again"
        case MoveStep.UNDONE:
            return f"stays on {move.source}: {move.told}"
        case MoveStep.PUBLISHED if move.pause_us is not None:
            return f"lives on {move.target}, and was closed for {move.pause_us / 1000:.1f} ms"
    return ""


def _eta_s(move: ShardMove) -> int | None:
    """Returns how long copying will take at the present rate, None where that isn't known."""
    behind = max(0, move.head - move.copied)
    return round(behind / move.cells_s) if move.cells_s else None if behind else 0


def _document(move: ShardMove) -> dict[str, Any]:
    return {
        "datastore": move.datastore,
        "shard": move.shard,
        "from": move.source,
        "to": move.target,
        "state": f"{move.state}, follows back" if move.is_back else str(move.state),
        "copied": move.copied,
        "head": move.head,
        "cells_s": move.cells_s,
        "eta_s": _eta_s(move),
        "pause_ms": None if move.pause_us is None else round(move.pause_us / 1000, 1),
        "told": move.told,
        "lag_max_ms": move.lag_max_ms,
        "commit_max_ms": move.commit_max_ms,
    }
