"""topology.json as the stack writes it, and private files in general: owner only, replaced atomically."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from schemaless.stack.accounts import SERVICE_USER, Accounts
from schemaless.stack.mysql_server import MySQLServer
from schemaless.topology import TOPOLOGY_VERSION, Role


def topology_document(servers: Sequence[MySQLServer], accounts: Accounts) -> dict[str, Any]:
    """The format of schemaless/topology.py, with the services' account."""
    clusters: dict[str, Any] = {}
    for server in servers:
        cluster = clusters.setdefault(server.cluster, {"master": None, "minions": []})
        if server.role is Role.MASTER:
            cluster["master"] = _node(server, accounts)
        else:
            cluster["minions"].append(_node(server, accounts))
    return {"version": TOPOLOGY_VERSION, "clusters": clusters}


def write_private_json(path: Path, document: Any) -> None:
    """A reader sees the old file or the whole new one; nobody but the owner sees either."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    fresh.touch(mode=0o600)
    with fresh.open("w") as file:
        json.dump(document, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def _node(server: MySQLServer, accounts: Accounts) -> dict[str, Any]:
    return {
        "name": server.name,
        "host": "127.0.0.1",
        "port": server.port,
        "socket": str(server.socket),
        "user": SERVICE_USER,
        "password": accounts.service_password,
    }
