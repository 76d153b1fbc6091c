"""What a server's own settings promise: a master keeps what it acknowledged (I5), and a minion shows it in order (I3).

They are asked when a node is first used and every minute, so a change by hand is noticed. A minion's flush and sync
don't count until it is promoted: what a crash takes from it comes again from its master.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import msgspec
import structlog

from schemaless.errors import NotDurable
from schemaless.storage.operation import Operation, query
from schemaless.topology import Node, Role

log = structlog.get_logger()

PERIOD_S = 60.0


class SettingFault(msgspec.Struct, frozen=True):
    """One setting that breaks a promise. `loses` is true where what was acknowledged may be lost."""

    name: str
    value: str
    wanted: str
    loses: bool

    def __str__(self) -> str:
        return f"{self.name} is {self.value}, and must be {self.wanted}"


class ServerSettings:
    """What is known of one server's settings. `faults` are those of the latest answer."""

    def __init__(self, node: Node, *, lossy_allowed: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self.faults: Sequence[SettingFault] = []
        self._node = node
        self._lossy_allowed = lossy_allowed
        self._clock = clock
        self._asked_at: float | None = None

    def due(self) -> bool:
        """True if the server has to be asked before it is used."""
        return self._asked_at is None or self._clock() - self._asked_at >= PERIOD_S

    def ask(self) -> Operation[None]:
        """Asks the server. Logs what is new."""
        asked_before, asked_at = self._asked_at, self._clock()
        if asked_before is not None:
            self._asked_at = asked_at  # others go on meanwhile, by what is known
        answered = False
        try:
            rows = yield from query(_QUESTION)
            answered = True
        finally:
            self._asked_at = asked_at if answered else asked_before
        faults = faults_of(self._node.role, {str(name): str(value) for name, value in rows})
        if faults != self.faults:
            level = log.warning if faults else log.info
            level("a server's settings", node=self._node.name, faults=[str(fault) for fault in faults])
        self.faults = faults

    def require_durable(self) -> None:
        """Raises NotDurable for a master that may lose what it acknowledges, unless that is allowed."""
        lossy = [str(fault) for fault in self.faults if fault.loses]
        if lossy and not self._lossy_allowed:
            raise NotDurable(f"{self._node.name} may lose what it acknowledges: {'; '.join(lossy)}")


def faults_of(role: Role, values: Mapping[str, str]) -> list[SettingFault]:
    """Returns what a server's settings break. A setting that the server doesn't have breaks nothing."""
    faults = []

    def want(name: str, wanted: str, *, loses: bool = False) -> None:
        value = values.get(name, wanted)
        if value != wanted:
            faults.append(SettingFault(name, value, wanted, loses))

    logs = values.get("log_bin", "ON") == "ON"
    if role is Role.MASTER:
        want("innodb_flush_log_at_trx_commit", "1", loses=True)
        if logs:
            want("sync_binlog", "1", loses=True)
    elif int(values.get("replica_parallel_workers", "0")) > 1:  # MySQL. MariaDB commits in order in every mode
        want("replica_preserve_commit_order", "ON")
    if logs:
        want("binlog_format", "ROW")
    return faults


_NAMES = (
    "log_bin",
    "innodb_flush_log_at_trx_commit",
    "sync_binlog",
    "binlog_format",
    "replica_preserve_commit_order",
    "replica_parallel_workers",
)
_QUESTION = "SHOW GLOBAL VARIABLES WHERE Variable_name IN (" + ", ".join(f"'{name}'" for name in _NAMES) + ")"
