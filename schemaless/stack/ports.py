"""Free TCP ports on loopback. Owns how a port is picked, and what is said of one that is taken."""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Mapping

from schemaless.errors import Misconfigured

# Below what Linux gives to outgoing connections (32768 and up), so a kept port isn't lost to one of them.
PORTS = range(20000, 32000)
ATTEMPTS_MAX = 200


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
    """Different ports that are free now. Picked at random, so that two stacks started at once seldom meet."""
    chosen: list[int] = []
    for port in random.sample(PORTS, ATTEMPTS_MAX):
        if len(chosen) == count:
            return chosen
        if is_free(port):
            chosen.append(port)
    raise PortInUse(f"no {count} free ports found between {PORTS.start} and {PORTS.stop}")


def require_free(ports: Mapping[str, int]) -> None:
    """Raises PortInUse with the first port that another program has. `ports` are by purpose."""
    for purpose, port in ports.items():
        if not is_free(port):
            raise PortInUse(f"port {port} ({purpose}) is in use by another program")
