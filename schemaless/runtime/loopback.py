"""Which hosts are this machine itself."""

from __future__ import annotations

import ipaddress
from contextlib import suppress

NAMES = ("localhost", "127.0.0.1", "::1")


def is_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
