"""`schemaless triggers run|list|status|resume`: trigger programs, their lag, and shards that stopped."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from schemaless.cli.targets import (
    DEFAULT_DATASTORE,
    DatastoreOption,
    HostsOption,
    JsonOption,
    known_hosts,
    open_client,
    servers,
)
from schemaless.extras import Extra, needs
from schemaless.names import trigger_consumer
from schemaless.stack.program import ending_with_supervisor
from schemaless.topology import load_topology

_RESTART_PAUSE_S = 1.0
_BROKEN_WITHIN_S = 5.0  # a first start that ends so soon would only end again
_STOP_TIMEOUT_S = 15.0
_POLL_S = 0.2

ProgramName = Annotated[str, typer.Argument(help="last part of the module's name")]


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Run trigger programs and look after them.", no_args_is_help=True)
    commands: dict[str, Callable[..., None]] = {"run": run, "list": list_all, "status": status, "resume": resume}
    for name, function in commands.items():
        group.command(name)(function)
    app.add_typer(group, name="triggers")


@needs("triggers run", Extra.TRIGGERS)
def run(
    module: Annotated[str, typer.Argument(help="dotted module, or a .py file")],
    datastore: DatastoreOption = DEFAULT_DATASTORE,
    workers: Annotated[int, typer.Option(min=1, max=64, help="processes, which share the partitions")] = 1,
    start: Annotated[str, typer.Option("--from", help="beginning or end, for shards without checkpoint")] = "beginning",
) -> None:
    """Run a trigger program until Ctrl-C; a worker that dies is started again."""
    reached = servers()
    environment = [f"SCHEMALESS_TOPOLOGY={reached.topology}", f"SCHEMALESS_KAFKA={reached.kafka}"]
    if hosts := known_hosts():
        environment.append(f"SCHEMALESS_HOSTS={','.join(hosts)}")
    worker = [sys.executable, "-m", "schemaless.consume.trigger_worker", module]
    command = ["env", *environment, *worker, "--datastore", datastore, "--from", start]
    raise typer.Exit(Workers(command, workers).run())


def list_all(
    datastore: DatastoreOption = DEFAULT_DATASTORE, hosts: HostsOption = "", as_json: JsonOption = False
) -> None:
    """Programs of a datastore with their lag."""
    with open_client(hosts, datastore) as client:
        document = client.document("/triggers")
    if as_json:
        _print_json(document)
        return
    table = Table("program", "state", "cells behind", "stopped shards")
    for program in document["triggers"]:
        table.add_row(program["program"], program["state"], str(program["lag"]), str(len(program["stopped"])))
    Console().print(table)


def status(
    program: ProgramName,
    datastore: DatastoreOption = DEFAULT_DATASTORE,
    hosts: HostsOption = "",
    as_json: JsonOption = False,
) -> None:
    """One program: how far behind it is, and why shards stopped."""
    with open_client(hosts, datastore) as client:
        document = client.document(f"/triggers/{program}")
    if as_json:
        _print_json(document)
        return
    print(f"{document['program']} {document['state']}, {document['lag']} cells behind")
    for shard in document["stopped"]:
        print(f"shard {shard['shard']} stopped: {shard['reason']}")


@needs("triggers resume", Extra.MYSQL)
def resume(
    program: ProgramName,
    datastore: DatastoreOption = DEFAULT_DATASTORE,
    shard: Annotated[list[int] | None, typer.Option(help="only these")] = None,
) -> None:
    """Let shards that stopped run again, at the cell where they stopped."""
    from schemaless.storage import checkpoint_table
    from schemaless.storage.pymysql_driver import SyncStorage

    consumer = trigger_consumer(program)
    with SyncStorage(load_topology(servers().topology)) as storage:
        resumed = sum(
            storage.master(cluster).run(checkpoint_table.resume, datastore, consumer, shard or ())
            for cluster in storage.topology.clusters
        )
    print(f"{resumed} shards run again")


class Workers:
    """Processes of one command, kept running until SIGTERM or Ctrl-C."""

    def __init__(self, command: Sequence[str], count: int) -> None:
        self._command = command
        self._count = count
        self._stopping = False

    def run(self) -> int:
        """Returns the exit status: that of a worker which can't even start, else 0."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        began = time.monotonic()
        processes = [self._start() for _ in range(self._count)]
        try:
            while not self._stopping:
                for place, process in enumerate(processes):
                    if process.poll() is not None:
                        if time.monotonic() - began < _BROKEN_WITHIN_S:
                            return process.returncode
                        time.sleep(_RESTART_PAUSE_S)
                        processes[place] = self._start()
                time.sleep(_POLL_S)
            return 0
        finally:
            self._end(processes)

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(ending_with_supervisor(self._command))

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        self._stopping = True

    def _end(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        for process in processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _print_json(document: Any) -> None:
    print(json.dumps(document, indent=2))
