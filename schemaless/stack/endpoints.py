"""endpoints.json: the addresses and pids of a running stack. Its form is fixed (docs/stack.md).

Code that changes its content calls `refresh_endpoints`. A lock makes the last writer know the latest state. Run as
`python -m schemaless.stack.endpoints HOME` by supervisord, it also refreshes the file when a supervised process changes
its state, and every five seconds for datastores that somebody made.
"""

from __future__ import annotations

import fcntl
import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import msgspec

from schemaless.bus.kafka_accounts import KafkaUser
from schemaless.errors import AccountRefused, SchemalessError, StorageUnavailable, Unavailable
from schemaless.ops.datastores import list_datastores
from schemaless.stack.admin import READER_USER
from schemaless.stack.plan import StackPlan, require_plan, write_private_json
from schemaless.stack.programs import SEE_LOG
from schemaless.stack.supervision import ProcessStatus, processes
from schemaless.storage.operation import query
from schemaless.storage.pymysql_driver import SyncStorage
from schemaless.topology import Topology, load_topology

MASTERS_TIMEOUT_S = 60.0


def refresh_endpoints(home: Path) -> dict[str, Any]:
    """Writes the file if it has changed, and returns its content. Raises StackDown."""
    plan = require_plan(home)
    with _locked(plan):
        try:
            written: dict[str, Any] = json.loads(plan.endpoints_file.read_bytes())
        except (OSError, ValueError):
            written = {}
        running = {process.name: process for process in processes(home)}
        try:
            known = list_datastores(load_topology(plan.topology_file)).values()
        except SchemalessError:  # no master answers: the last file's datastores are the best there is
            datastores = written.get("datastores", {})
        else:
            datastores = {
                datastore.name: {
                    "shards": datastore.shards,
                    "topic": datastore.topic,
                    "partitions": datastore.partitions,
                }
                for datastore in known
            }
        document = {
            "api": plan.api_urls(),
            "kafka": plan.broker().bootstrap,
            **_kafka_account(plan),
            "clusters": _clusters(plan, running),
            "datastores": datastores,
            "processes": [
                {
                    "name": process.name,
                    "role": process.role,
                    "pid": process.pid,
                    "log": str(process.log),
                    "metrics": process.metrics_port and f"http://127.0.0.1:{process.metrics_port}/metrics",
                }
                for process in running.values()
            ],
        }
        if document != written:
            write_private_json(plan.endpoints_file, document)
            write_private_json(plan.scrape_targets_file, _scrape_targets(running.values()))
        return document


def _kafka_account(plan: StackPlan) -> dict[str, Any]:
    """Returns the reader's account, if Kafka has accounts."""
    if plan.kafka_accounts is None:
        return {}
    return {"kafka_account": msgspec.to_builtins(plan.kafka_accounts.account(KafkaUser.READER))}


def remove_endpoints(plan: StackPlan) -> None:
    """Removes the file of a stack that is down, whose pids are no longer true."""
    with _locked(plan):
        plan.endpoints_file.unlink(missing_ok=True)
        plan.scrape_targets_file.unlink(missing_ok=True)


def _scrape_targets(running: Iterable[ProcessStatus]) -> list[dict[str, Any]]:
    """Returns the processes that serve metrics, in the form of Prometheus' file_sd_configs."""
    return [
        {
            "targets": [f"127.0.0.1:{process.metrics_port}"],
            "labels": {"job": f"schemaless-{process.role}", "process": process.name},
        }
        for process in running
        if process.metrics_port is not None
    ]


def _clusters(plan: StackPlan, running: Mapping[str, ProcessStatus]) -> dict[str, Any]:
    clusters: dict[str, Any] = {}
    topology = load_topology(plan.topology_file)
    masters = present_masters(topology)
    for server in plan.servers():
        if server.name not in topology.nodes:  # it is being added, and nobody uses it yet
            continue
        process = running.get(server.name)
        entry = {
            "name": server.name,
            "host": "127.0.0.1",
            "port": server.port,
            "socket": str(server.socket),
            "pid": process and process.pid,
            "user": READER_USER,
            "password": plan.accounts.reader_password,
        }
        cluster = clusters.setdefault(server.cluster, {"master": None, "minions": []})
        if server.name in masters:
            cluster["master"] = entry
        else:
            cluster["minions"].append(entry)
    return clusters


def present_masters(topology: Topology) -> set[str]:
    """Returns the names of the servers that are masters now."""
    with SyncStorage(topology) as storage:
        return {master.node.name for master in storage.masters}


def await_masters(topology: Topology, log: object) -> None:
    """Waits until the controller, whose log is named, has opened a master of each cluster. Raises Unavailable after a
    minute.
    """
    deadline = time.monotonic() + MASTERS_TIMEOUT_S
    while closed := closed_clusters(topology):
        if time.monotonic() > deadline:
            raise Unavailable(
                f"no server takes writes for {' and '.join(closed)}; the controller's log: {log}", hint=SEE_LOG
            )
        time.sleep(0.1)


def closed_clusters(topology: Topology) -> list[str]:
    """Returns the clusters that no server takes writes for."""
    with SyncStorage(topology) as storage:
        storage.look()
        return [name for name in topology.clusters if not _is_open(storage, name)]


def _is_open(storage: SyncStorage, cluster: str) -> bool:
    try:
        ((read_only,),) = storage.master(cluster).run(query, "SELECT @@GLOBAL.read_only", again_on=())
    except AccountRefused:
        raise
    except StorageUnavailable:
        return False
    return cluster in storage.appointments and not read_only


@contextmanager
def _locked(plan: StackPlan) -> Iterator[None]:
    plan.run.mkdir(parents=True, exist_ok=True)
    with (plan.run / "endpoints.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def step(home: Path, events: TextIO, replies: TextIO) -> None:
    """Handles one event of supervisord, whose protocol is on stdin and stdout.

    If the file can't be written, that is printed to stderr: the next event writes the whole file again.
    """
    from supervisor import childutils  # not in the wheel's own dependencies

    childutils.listener.wait(events, replies)
    try:
        refresh_endpoints(home)
    except (SchemalessError, OSError) as error:
        print(f"endpoints.json was not written: {error}", file=sys.stderr, flush=True)
    childutils.listener.ok(replies)


def main() -> None:
    home = Path(sys.argv[1])
    # One foreign line on stdout, such as a library's warning, and supervisord never sends an event again.
    replies, sys.stdout = sys.stdout, sys.stderr
    while True:
        step(home, sys.stdin, replies)


if __name__ == "__main__":
    main()
