"""Open files: a process raises its limit, and doesn't start where its connections would exceed it (I14)."""

from __future__ import annotations

import resource

import structlog

from schemaless.errors import Misconfigured

log = structlog.get_logger()

FILES_MAX = 20_000
_RESERVED = 100
"""What the program itself, Kafka, logs and new connections to servers need."""
_CLIENTS_FEW = 256
_HOW = (
    "raise it with `ulimit -n`, LimitNOFILE= of systemd or --ulimit nofile= of Docker,"
    " or lower SCHEMALESS_MYSQL_CONNECTIONS_MAX"
)


def clients_within_limit(to_servers: int, *, clients_min: int = 0) -> int:
    """Raises the limit of open files as far as it goes, and returns how many files are left for clients.

    `to_servers` is the most connections to MySQL. Raises Misconfigured where fewer than `clients_min` are left.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_MAX if hard == resource.RLIM_INFINITY else min(hard, FILES_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    limit = FILES_MAX if soft == resource.RLIM_INFINITY else min(soft, FILES_MAX)
    needed = to_servers + _RESERVED + clients_min
    if limit < needed:
        raise Misconfigured(
            f"this process may open {limit} files and needs {needed}: {to_servers} for connections to MySQL,"
            f" {clients_min} for clients and {_RESERVED} for the rest; {_HOW}"
        )
    clients = limit - to_servers - _RESERVED
    if clients_min and clients < _CLIENTS_FEW:
        log.warning(
            "few clients can be served: this process may open few files",
            clients=clients,
            files=limit,
            hint=_HOW,
        )
    return clients
