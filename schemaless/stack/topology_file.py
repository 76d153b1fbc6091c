"""topology.json as the stack writes it, and private files in general: owner only, replaced atomically."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from schemaless.stack.accounts import Accounts
from schemaless.stack.mysql_server import MySQLServer
from schemaless.topology import TOPOLOGY_VERSION, Node, Role


def topology_document(servers: Sequence[MySQLServer], accounts: Accounts) -> dict[str, Any]:
    """The topology of a stack's own servers, with the services' account."""
    return nodes_document(server.node(accounts) for server in servers)


def nodes_document(nodes: Iterable[Node]) -> dict[str, Any]:
    """The format of schemaless/topology.py."""
    clusters: dict[str, Any] = {}
    for node in nodes:
        cluster = clusters.setdefault(node.cluster, {"master": None, "minions": []})
        if node.role is Role.MASTER:
            cluster["master"] = _entry(node)
        else:
            cluster["minions"].append(_entry(node))
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


def _entry(node: Node) -> dict[str, Any]:
    return {
        "name": node.name,
        "host": node.host,
        "port": node.port,
        "socket": node.socket,
        "user": node.user,
        "password": node.password,
    }
