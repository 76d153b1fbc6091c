"""`schemaless tailer status|pause|resume`, and the place of `seek`: what an operator of the log has in hand (I7)."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from schemaless.cli.tailer_seek import seek
from schemaless.cli.targets import JsonOption, named_datastore, servers
from schemaless.extras import Extra, needs
from schemaless.topology import load_topology

if TYPE_CHECKING:
    from schemaless.ops.tailer_status import ShardStatus, TailerStatus

NOBODY = "nobody"

Name = Annotated[str, typer.Argument(help="which datastore")]


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="The processes that bring the log to Kafka.", no_args_is_help=True)
    commands: dict[str, Callable[..., None]] = {"status": status, "pause": pause, "resume": resume, "seek": seek}
    for name, command in commands.items():
        group.command(name)(command)
    app.add_typer(group, name="tailer")


@needs("tailer status", Extra.KAFKA, Extra.MYSQL)
def status(
    datastore: Annotated[str | None, typer.Argument(help="default: every one")] = None,
    shards: Annotated[bool, typer.Option("--shards", help="each shard, too")] = False,
    as_json: JsonOption = False,
) -> None:
    """How far behind the head each shard is published, by whom, and what holds it up."""
    from schemaless.ops.datastores import list_datastores
    from schemaless.ops.tailer_status import read_tailer_status
    from schemaless.storage.pymysql_driver import SyncStorage

    reached = servers()
    topology = load_topology(reached.topology)
    wanted = list(list_datastores(topology).values()) if datastore is None else [named_datastore(topology, datastore)]
    with SyncStorage(topology) as storage:
        found = [read_tailer_status(storage, reached.kafka, each) for each in wanted]
    if as_json:
        print(json.dumps({"datastores": [_document(each, shards) for each in found]}, indent=2))
        return
    for each in found:
        _print(each, shards)


@needs("tailer pause", Extra.KAFKA, Extra.MYSQL)
def pause(datastore: Name) -> None:
    """Let nothing more be published until `resume`; every tailer sees it within two seconds. Nothing is lost."""
    _set_paused(datastore, paused=True)


@needs("tailer resume", Extra.KAFKA, Extra.MYSQL)
def resume(datastore: Name) -> None:
    """Publish again, from where it was paused."""
    _set_paused(datastore, paused=False)


def _set_paused(datastore: str, *, paused: bool) -> None:
    from schemaless.ops.tailer_control import set_paused
    from schemaless.storage.pymysql_driver import SyncStorage

    topology = load_topology(servers().topology)
    found = named_datastore(topology, datastore)
    with SyncStorage(topology) as storage:
        unreached = set_paused(storage, found.name, paused)
    print(f"{found.name} {'is paused' if paused else 'is tailed again'}")
    for cluster in unreached:
        print(f"the master of cluster {cluster} could not be told; what the others say counts")


def _print(status: TailerStatus, each_shard: bool) -> None:
    print(_headline(status))
    table = Table("tailer", "partitions", "shards behind", "cells", "oldest, s")
    for owner, shards in sorted(_by_owner(status).items()):
        partitions = sorted({shard.partition for shard in shards})
        table.add_row(owner, _ranges(partitions), str(_behind(shards)), str(_cells(shards)), f"{_seconds(shards):.1f}")
    Console().print(table)
    for shard in status.shards:
        if shard.problem is not None:
            print(f"shard {shard.shard}: {shard.problem}")
    if each_shard:
        _print_shards(status.shards)


def _headline(status: TailerStatus) -> str:
    state = "paused" if status.command.paused else "tailed"
    shards = status.shards
    return (
        f"{status.datastore.name}: {state}; {_behind(shards)} of {len(shards)} shards are behind,"
        f" by {_cells(shards)} cells, the oldest {_seconds(shards):.1f} s old"
    )


def _print_shards(shards: Sequence[ShardStatus]) -> None:
    table = Table("shard", "partition", "published", "head", "cells", "oldest, s")
    for shard in shards:
        places = [str(location or "-") for location in (shard.published, shard.head)]
        table.add_row(str(shard.shard), str(shard.partition), *places, str(shard.lag), f"{shard.lag_s:.1f}")
    Console().print(table)


def _document(status: TailerStatus, each_shard: bool) -> dict[str, Any]:
    document = {
        "datastore": status.datastore.name,
        "paused": status.command.paused,
        "shards_behind": _behind(status.shards),
        "lag": _cells(status.shards),
        "lag_s": _seconds(status.shards),
        "partitions": [_partition(status, partition) for partition in range(status.datastore.partitions)],
        "problems": [{"shard": each.shard, "why": each.problem} for each in status.shards if each.problem],
    }
    return document | ({"shards": list(map(_shard, status.shards))} if each_shard else {})


def _partition(status: TailerStatus, partition: int) -> dict[str, Any]:
    owner = status.owners.get(partition)
    shards = [shard for shard in status.shards if shard.partition == partition]
    return {
        "partition": partition,
        "owner": None if owner is None else {"client": owner.client, "host": owner.host},
        "shards_behind": _behind(shards),
        "lag": _cells(shards),
        "lag_s": _seconds(shards),
    }


def _shard(shard: ShardStatus) -> dict[str, Any]:
    return {
        "shard": shard.shard,
        "partition": shard.partition,
        "published": None if shard.published is None else str(shard.published),
        "head": None if shard.head is None else str(shard.head),
        "lag": shard.lag,
        "lag_s": shard.lag_s,
    }


def _by_owner(status: TailerStatus) -> dict[str, list[ShardStatus]]:
    found: dict[str, list[ShardStatus]] = defaultdict(list)
    for shard in status.shards:
        owner = status.owners.get(shard.partition)
        found[NOBODY if owner is None else f"{owner.client} {owner.host}"].append(shard)
    return found


def _behind(shards: Sequence[ShardStatus]) -> int:
    return sum(shard.lag > 0 for shard in shards)


def _cells(shards: Sequence[ShardStatus]) -> int:
    return sum(shard.lag for shard in shards)


def _seconds(shards: Sequence[ShardStatus]) -> float:
    return max((shard.lag_s for shard in shards), default=0.0)


def _ranges(numbers: Sequence[int]) -> str:
    """Consecutive ones as FIRST-LAST."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return " ".join("-".join(map(str, run)) for run in runs)
