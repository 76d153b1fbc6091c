"""Free TCP ports on loopback. Owns how a port is picked, and what is said of one that is taken."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import socket
import tempfile
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from schemaless.errors import Misconfigured

# Below what Linux gives to outgoing connections (32768 and up), so a kept port isn't lost to one of them.
PORTS = range(20000, 32000)
ATTEMPTS_MAX = 200
USUAL_PORTS = {"api-0": 8000, "api-1": 8001, "kafka": 9092}
_reserved: set[int] = set()
"""The ports that this process was given. The kernel doesn't refuse a process its own lock."""


class PortInUse(Misconfigured):
    hint = "stop the program that listens there, or start with another SCHEMALESS_HOME"


def is_free(port: int) -> bool:
    """True if a server could listen on this port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the servers do: TIME_WAIT is no obstacle
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise
    return True


def free_ports(count: int) -> list[int]:
    """Different ports that are free now. No other process of this user is given one while this process lives.

    A server takes seconds until it listens. Without that, another stack could pick its port in the meantime.
    """
    chosen: list[int] = []
    for port in random.sample(PORTS, min(ATTEMPTS_MAX, len(PORTS))):
        if len(chosen) < count and is_free(port) and _reserve(port):
            chosen.append(port)
    if len(chosen) < count:
        raise PortInUse(f"no {count} free ports found between {PORTS.start} and {PORTS.stop}")
    return chosen


def _reserve(port: int) -> bool:
    """Returns False if a process has this port already, be it this one. The kernel gives it back when this one ends."""
    if port in _reserved:
        return False
    try:
        fcntl.lockf(_reservations(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except BlockingIOError:
        return False
    _reserved.add(port)
    return True


@lru_cache(maxsize=1)
def _reservations() -> int:
    """A file of this user, of which one byte is locked for each port. It stays open: closing it would give all back."""
    path = Path(tempfile.gettempdir()) / f"schemaless-ports-{os.getuid()}"
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)


def take_usual_ports(record: Path, home: Path) -> dict[str, int]:
    """Returns the ports of USUAL_PORTS that are free, unless another stack of this user has them.

    `record` names the stack that took them. It may be down, and wants them again when it is started.
    """
    record.parent.mkdir(parents=True, exist_ok=True)
    with record.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        owner = file.read().strip()
        if owner and owner != str(home) and (Path(owner) / "stack.json").exists():
            return {}
        file.truncate(0)
        file.write(str(home))
    return {name: port for name, port in USUAL_PORTS.items() if is_free(port)}


def require_free(ports: Mapping[str, int]) -> None:
    """Raises PortInUse with the first port that another program has. `ports` are by purpose."""
    for purpose, port in ports.items():
        if not is_free(port):
            raise PortInUse(f"port {port} ({purpose}) is in use by another program")
