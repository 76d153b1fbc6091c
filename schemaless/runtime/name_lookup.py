"""NameLookups: the addresses of hosts, looked up in threads, so that a caller waits no longer than it wants to (I14).

The C library waits half a minute for a name server that is away, and can't be interrupted.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
from concurrent.futures import Future


class NameLookups:
    """Looks each name up once at a time for all that wait. Threads and tasks share it. A child of `fork` doesn't."""

    def __init__(self) -> None:
        self._under_way: dict[str, Future[list[str]]] = {}
        self._lock = threading.Lock()

    def begin(self, name: str) -> Future[list[str]]:
        """Returns the addresses to come, as numeric text in the order of preference, or the OSError of the look-up."""
        numeric = _numeric(name)
        if numeric is not None:
            return numeric
        with self._lock:
            if (found := self._under_way.get(name)) is None:
                found = Future()
                found.set_running_or_notify_cancel()  # one of several that wait can't cancel it
                # A daemon: the process ends without waiting for it.
                threading.Thread(target=self._look_up, args=(name, found), daemon=True).start()
                self._under_way[name] = found
            return found

    def is_under_way(self, name: str) -> bool:
        with self._lock:
            return name in self._under_way

    def _look_up(self, name: str, found: Future[list[str]]) -> None:
        addresses: list[str] = []
        error: OSError | None = None
        try:
            infos = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
            numeric = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
            addresses = list(dict.fromkeys(socket.getnameinfo(info[4], numeric)[0] for info in infos))
        except OSError as caught:
            error = caught
        except ValueError as caught:  # also a UnicodeError
            error = socket.gaierror(socket.EAI_NONAME, f"{name!r} is no name of a host: {caught}")
        with self._lock:
            del self._under_way[name]
        if error is None:
            found.set_result(addresses)
        else:
            found.set_exception(error)


def _numeric(address: str) -> Future[list[str]] | None:
    try:
        numeric = str(ipaddress.ip_address(address))
    except ValueError:
        return None
    found: Future[list[str]] = Future()
    found.set_result([numeric])
    return found


def no_address(name: str, timeout_s: float) -> socket.gaierror:
    """Returns the error of a look-up that took longer than its caller waits."""
    return socket.gaierror(
        socket.EAI_AGAIN, f"no address of {name} within {timeout_s:.3g} s: does the name server answer?"
    )
