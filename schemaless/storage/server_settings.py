"""What a server's own settings promise: a master keeps what it acknowledged (I5), and a minion shows all of it (I3).

They are asked when a node is first used and every minute, so a change by hand is noticed. A minion's flush and sync
don't count until it is promoted: what a crash takes from it comes again from its master. A minion that leaves something
out shows its heads all the same, so it is not read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import msgspec
import structlog

from schemaless.errors import ForeignFormat, NodeRefuses, NotDurable, NotWhole
from schemaless.names import Stall
from schemaless.storage.operation import Operation, query
from schemaless.storage.schema import FORMAT_VERSION, formats
from schemaless.storage.sql import Name, sql
from schemaless.storage.standstill import SHOW_REPLICATION, replication
from schemaless.topology import Node, Role

log = structlog.get_logger()

PERIOD_S = 60.0
FAULTY_PERIOD_S = 1.0
"""How soon one is asked again that isn't used for a fault: a controller, or a person, may be about to correct it."""
PACKET_BYTES_MIN = 16 << 20
"""The smallest max_allowed_packet that takes every script. It is MariaDB's default."""
NET_TIMEOUT_MAX_S = 10
"""For so long a minion may take a master for alive that vanished without a word. Nothing is promoted meanwhile."""


class SettingFault(msgspec.Struct, frozen=True):
    """One setting that breaks a promise, or the entity tables themselves.

    `loses` is true where what was acknowledged may be lost, `hides` where a minion may lack what its heads show, and
    `is_foreign` where another release made the databases.
    """

    name: str
    value: str
    wanted: str
    loses: bool = False
    hides: bool = False
    is_foreign: bool = False

    def __str__(self) -> str:
        return f"{self.name} is {self.value}, and must be {self.wanted}"

    @property
    def bars(self) -> bool:
        """Whether something isn't asked of the server because of it."""
        return self.loses or self.hides or self.is_foreign

    @property
    def stall(self) -> Stall | None:
        return Stall.FILTER if self.hides else Stall.BOUND if "packet" in self.name else None


ServerIds = dict[str, tuple[str, Role, str]]
"""The cluster, the role and the server_id of servers by name."""


class ServerSettings:
    """What is known of one server's settings. `faults` are those of the latest answer, for the role that it had.

    `ids` is shared by the servers of an installation: each notes its own there, and compares it with the others'.
    """

    def __init__(
        self,
        node: Node,
        role: Role = Role.MASTER,
        *,
        lossy_allowed: bool = False,
        ids: ServerIds | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.faults: Sequence[SettingFault] = []
        self.role = role
        self._node = node
        self._lossy_allowed = lossy_allowed
        self._ids: ServerIds = {} if ids is None else ids
        self._clock = clock
        self._asked_at: float | None = None
        self._lacks = set[tuple[str, int]]()

    def appoint(self, role: Role) -> None:
        """Says which role the server has from now on. In another one it has to keep other promises.

        It is told whenever a master was appointed. A controller corrects the settings of one just before that.
        """
        if role is not self.role or self.faults:
            self._asked_at = None
        if role is not self.role:
            self.role, self.faults = role, []

    def due(self) -> bool:
        """True if the server has to be asked before it is used."""
        period_s = FAULTY_PERIOD_S if any(fault.bars for fault in self.faults) else PERIOD_S
        return self._asked_at is None or self._clock() - self._asked_at >= period_s

    def ask(self) -> Operation[None]:
        """Asks the server. Logs what is new."""
        role, asked_before, asked_at = self.role, self._asked_at, self._clock()
        if asked_before is not None:
            self._asked_at = asked_at  # others go on meanwhile, by what is known
        answered = False
        try:
            values = {str(name): str(value) for name, value in (yield from query(_QUESTION))}
            if role is Role.MINION:
                values |= yield from _replication(is_mariadb=_MARIADB_ONLY in values)
            for cell in sorted(self._lacks):
                if not (yield from _lacks_still(*cell)):
                    self._lacks.discard(cell)
            formats = yield from _formats()
            answered = True
        finally:
            self._asked_at = asked_at if answered and role is self.role else asked_before
        foreign = [SettingFault("format", str(one), str(FORMAT_VERSION), is_foreign=True) for one in formats]
        shared = self._shared_id(values.get("server_id"))
        self._know(faults_of(role, values) + shared + [fault for fault in foreign if fault.value != fault.wanted])

    def _shared_id(self, number: str | None) -> list[SettingFault]:
        """Returns that another server has the same id. A minion takes what its master wrote for its own then."""
        if number is None:
            return []
        own, cluster = self._node.name, self._node.cluster
        self._ids[own] = cluster, self.role, number
        others = sorted(
            ((of, role) != (cluster, Role.MASTER), name)
            for name, (of, role, known) in self._ids.items()
            if known == number and name != own
        )
        return [
            SettingFault("server_id", number, f"another than that of {name}", hides=not skips_nothing)
            for skips_nothing, name in others[:1]
        ]

    def lacks(self, error: NotWhole) -> None:
        """Records a cell that the server doesn't show, and its master does. It counts until the server shows it."""
        if len(self._lacks) < _LACKS_MAX:
            self._lacks.add((error.database, error.added_id))
        self._know([fault for fault in self.faults if fault.name != _ENTITY])

    def holes(self) -> tuple[list[str], list[SettingFault]]:
        """Returns a cell that the server doesn't show and its master does, and what will leave out more."""
        faults = self.faults
        lacks = [fault.value.removeprefix("without ") for fault in faults if fault.name == _ENTITY]
        return lacks, [fault for fault in faults if fault.hides and fault.name != _ENTITY]

    @property
    def lacking(self) -> list[tuple[str, int]]:
        """The cells that the server doesn't show and its master did, by database and added_id."""
        return sorted(self._lacks)

    def pass_over(self, database: str, added_id: int) -> None:
        """Takes a cell for no fault of this server: its present master lacks it, too."""
        self._lacks.discard((database, added_id))
        self._know([fault for fault in self.faults if fault.name != _ENTITY])

    def _know(self, faults: Sequence[SettingFault]) -> None:
        if self._lacks:
            database, added_id = min(self._lacks)
            faults = [*faults, SettingFault(_ENTITY, f"without added_id {added_id} of {database}", "whole", hides=True)]
        if faults != self.faults:
            level = log.warning if faults else log.info
            stalls = sorted({str(fault.stall) for fault in faults if fault.stall})
            level("a server's settings", node=self._node.name, faults=[str(fault) for fault in faults], stalls=stalls)
        self.faults = faults

    def require_usable(self, *, writes: bool) -> None:
        """Raises ForeignFormat for databases of another release, NotDurable for a master that may lose what it
        acknowledges, unless that is allowed, and NotWhole for a minion that may lack what its heads show.
        """
        if foreign := [str(fault) for fault in self.faults if fault.is_foreign]:
            raise ForeignFormat(f"{self._node.name} has databases of another release: {foreign[0]}")
        lossy = [str(fault) for fault in self.faults if fault.loses]
        if writes and lossy and not self._lossy_allowed:
            raise NotDurable(f"{self._node.name} may lose what it acknowledges: {'; '.join(lossy)}")
        hiding = [str(fault) for fault in self.faults if fault.hides]
        if not writes and hiding and self.role is Role.MINION:
            raise NotWhole(f"{self._node.name} may lack cells: {'; '.join(hiding)}")


class _Wanted(msgspec.Struct, frozen=True):
    """The value that a setting must have: on servers of one role, or on all."""

    name: str
    value: str
    role: Role | None = None
    loses: bool = False
    hides: bool = False


def faults_of(role: Role, values: Mapping[str, str]) -> list[SettingFault]:
    """Returns what a server's settings break. A setting that the server doesn't have breaks nothing."""
    ignored = set()
    if values.get("log_bin") == "OFF":
        ignored |= {"sync_binlog", "binlog_format"}
    if int(values.get("replica_parallel_workers", "0")) <= 1:  # MySQL. MariaDB commits in order in every mode
        ignored.add("replica_preserve_commit_order")
    faults = [
        SettingFault(one.name, values[one.name], one.value or "empty", one.loses, one.hides)
        for one in _WANTED
        if one.role in (None, role) and one.name not in ignored and values.get(one.name, one.value) != one.value
    ]
    small = [name for name in _PACKETS if int(values.get(name, PACKET_BYTES_MIN)) < PACKET_BYTES_MIN]
    slow = [name for name in _NET_TIMEOUTS if role is Role.MINION and int(values.get(name, 0)) > NET_TIMEOUT_MAX_S]
    faults += [SettingFault(name, values[name], f"{PACKET_BYTES_MIN} or more") for name in small]
    return faults + [SettingFault(name, values[name], f"{NET_TIMEOUT_MAX_S} s or less") for name in slow]


_ENTITY = "entity"
_LACKS_MAX = 8
_SOURCE = "replication source"
_MARIADB_ONLY = "gtid_domain_id"
_FILTERS = (
    "replicate_do_db",
    "replicate_ignore_db",
    "replicate_do_table",
    "replicate_ignore_table",
    "replicate_wild_do_table",
    "replicate_wild_ignore_table",
)
_FILTER_COLUMNS = {**dict(enumerate(_FILTERS, 12)), 38: "replicate_ignore_server_ids"}
_FILTERS_MARIADB = {44: "replicate_do_domain_ids", 45: "replicate_ignore_domain_ids"}
_FILTERS_MYSQL = {54: "replicate_rewrite_db"}
"""Of SHOW REPLICA STATUS."""
_PACKETS = ("max_allowed_packet", "slave_max_allowed_packet", "replica_max_allowed_packet")
_NET_TIMEOUTS = ("slave_net_timeout", "replica_net_timeout")
_WANTED = (
    _Wanted("innodb_flush_log_at_trx_commit", "1", Role.MASTER, loses=True),
    _Wanted("sync_binlog", "1", Role.MASTER, loses=True),
    _Wanted("binlog_format", "ROW"),
    _Wanted("replica_preserve_commit_order", "ON", Role.MINION),
    _Wanted("read_only", "ON", Role.MINION),
    *(_Wanted(f"log_{kind}_updates", "ON", Role.MINION) for kind in ("slave", "replica")),
    _Wanted(SHOW_REPLICATION, "granted", Role.MINION),
    _Wanted("replicate_events_marked_for_skip", "REPLICATE", Role.MINION, hides=True),
    *(_Wanted(f"{prefix}_exec_mode", "STRICT", Role.MINION, hides=True) for prefix in ("slave", "replica")),
    *(_Wanted(f"{prefix}_skip_errors", "OFF", Role.MINION, hides=True) for prefix in ("slave", "replica")),
    *(
        _Wanted(name, "", Role.MINION, hides=True)
        for name in (*_FILTER_COLUMNS.values(), *_FILTERS_MARIADB.values(), *_FILTERS_MYSQL.values())
    ),
    _Wanted(_SOURCE, "a master", Role.MINION, hides=True),
)
_OTHERS = "log_bin", "replica_parallel_workers", "server_id", _MARIADB_ONLY
_NAMES = (*(one.name for one in _WANTED), *_PACKETS, *_NET_TIMEOUTS, *_OTHERS)
_QUESTION = "SHOW GLOBAL VARIABLES WHERE Variable_name IN (" + ", ".join(f"'{name}'" for name in _NAMES) + ")"


def _replication(*, is_mariadb: bool) -> Operation[dict[str, str]]:
    """Returns the filters of a minion's replication, and whether it replicates at all. MySQL has filters in no
    variable, and MariaDB those of one source.
    """
    rows = yield from replication()
    if rows is None:
        return {SHOW_REPLICATION: "refused"}
    columns = _FILTER_COLUMNS | (_FILTERS_MARIADB if is_mariadb else _FILTERS_MYSQL)
    found = {} if rows else {_SOURCE: "nobody"}
    for row in rows:  # one for each source
        found |= {name: str(row[column]) for column, name in columns.items() if len(row) > column and row[column]}
    return found


def _formats() -> Operation[list[int]]:
    try:
        return (yield from formats())
    except NodeRefuses:  # its tables are being made
        return []


def _lacks_still(database: str, added_id: int) -> Operation[bool]:
    """Returns whether a cell isn't there, although the shard lives here and its head is as high."""
    name, _, shard = database.rpartition("_")
    heads = yield from query(
        sql("SELECT 1 FROM schemaless.shard_head WHERE datastore = %s AND shard = %s", name, int(shard))
        + f" AND moved_to IS NULL AND head >= {added_id}"
    )
    return bool(heads) and not (yield from shows(database, added_id))


def shows(database: str, added_id: int) -> Operation[bool]:
    """Returns whether the server has the cell at an added_id of a shard's database."""
    try:
        return bool((yield from query(sql("SELECT 1 FROM %s.entity WHERE added_id = %s", Name(database), added_id))))
    except NodeRefuses:
        return False
