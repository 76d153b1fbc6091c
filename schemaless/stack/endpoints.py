"""endpoints.json: where everything of a running stack is and which pid it has. Its form is docs/stack.md's and fixed.

Whoever changes what it says calls `refresh_endpoints`; inside a lock, so the last writer knew the latest.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from schemaless.errors import SchemalessError
from schemaless.ops.datastores import list_datastores
from schemaless.stack.accounts import READER_USER
from schemaless.stack.mysql_server import MySQLServer
from schemaless.stack.plan import StackPlan, require_plan
from schemaless.stack.supervision import ProcessStatus, processes
from schemaless.stack.topology_file import write_private_json
from schemaless.topology import Datastore, Role, load_topology


def refresh_endpoints(home: Path) -> dict[str, Any]:
    """Write the file anew and return what it says. Raises StackDown."""
    plan = require_plan(home)
    with _locked(plan):
        running = {process.name: process for process in processes(home)}
        document = {
            "api": plan.api_urls(),
            "kafka": plan.broker().bootstrap,
            "clusters": _clusters(plan, running),
            "datastores": _datastores(plan),
            "processes": [_process(process) for process in running.values()],
        }
        if document != _last_written(plan):
            write_private_json(plan.endpoints_file, document)
        return document


def remove_endpoints(plan: StackPlan) -> None:
    """For a stack that is down: nobody should trust old pids."""
    with _locked(plan):
        plan.endpoints_file.unlink(missing_ok=True)


def _clusters(plan: StackPlan, running: Mapping[str, ProcessStatus]) -> dict[str, Any]:
    clusters: dict[str, Any] = {}
    for server in plan.servers():
        cluster = clusters.setdefault(server.cluster, {"master": None, "minions": []})
        entry = _server(server, plan, running.get(server.name))
        if server.role is Role.MASTER:
            cluster["master"] = entry
        else:
            cluster["minions"].append(entry)
    return clusters


def _server(server: MySQLServer, plan: StackPlan, process: ProcessStatus | None) -> dict[str, Any]:
    return {
        "name": server.name,
        "host": "127.0.0.1",
        "port": server.port,
        "socket": str(server.socket),
        "pid": process and process.pid,
        "user": READER_USER,
        "password": plan.accounts.reader_password,
    }


def _process(process: ProcessStatus) -> dict[str, Any]:
    return {"name": process.name, "role": process.role, "pid": process.pid, "log": str(process.log)}


def _datastores(plan: StackPlan) -> dict[str, Any]:
    """From the catalogue; from the last file while no master answers."""
    try:
        found = list_datastores(load_topology(plan.topology_file))
    except SchemalessError:
        return _last_known(plan)
    return {name: _datastore(datastore) for name, datastore in found.items()}


def _datastore(datastore: Datastore) -> dict[str, Any]:
    return {"shards": datastore.shards, "topic": datastore.topic, "partitions": datastore.partitions}


def _last_known(plan: StackPlan) -> dict[str, Any]:
    known: dict[str, Any] = _last_written(plan).get("datastores", {})
    return known


def _last_written(plan: StackPlan) -> dict[str, Any]:
    try:
        written: dict[str, Any] = json.loads(plan.endpoints_file.read_bytes())
    except (OSError, ValueError):
        return {}
    return written


@contextmanager
def _locked(plan: StackPlan) -> Iterator[None]:
    plan.run.mkdir(parents=True, exist_ok=True)
    with (plan.run / "endpoints.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
