"""What a controller does to one server. It looks, and once the server has promised to obey its ballot, it acts.

Which server, and when, isn't decided here. The acts of a ballot run in one session that holds a lock and never
reconnects. The next controller ends that session before it gets a promise. So a controller that was late does nothing
any more: its acts raise StorageUnavailable.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import msgspec

from schemaless.errors import (
    Misconfigured,
    NodeRefuses,
    NotWhole,
    Outvoted,
    StateConflict,
    StorageUnavailable,
    TableMissing,
)
from schemaless.location import Location
from schemaless.storage.admin_session import SHOW_REPLICATION, AdminSession, ReplicationStatus
from schemaless.storage.appointment_table import ALL, STATES, STEPS, TABLE, ClusterState, Step
from schemaless.storage.sql import commas, literal, literals, where
from schemaless.topology import Appointment, Ballot, Node

LOCK = "schemaless.controller"
CONNECT_TIMEOUT_S = 1.0
LOOK_TIMEOUT_S = 2.0
ACT_TIMEOUT_S = 10.0
END_TIMEOUT_S = 5.0
"""How long the end of a killed session is awaited. It undoes its transaction first."""
POLL_S = 0.01

# The time of the statement minus the seconds since the start: exact, and the same also if the clock is set.
_LOOK = (
    "SELECT @@server_id AS server_id, @@GLOBAL.read_only AS read_only, UNIX_TIMESTAMP() - variable_value AS started_at"
)
_LOOK_MARIADB = (
    f"{_LOOK}, CONCAT(@@server_id) AS writes_as,"
    " TRIM(BOTH ',' FROM CONCAT(@@GLOBAL.gtid_binlog_state, ',', @@GLOBAL.gtid_slave_pos)) AS executed"
    " FROM information_schema.global_status WHERE variable_name = 'Uptime'"
)
_LOOK_MYSQL = (
    f"{_LOOK}, @@server_uuid AS writes_as, REPLACE(@@GLOBAL.gtid_executed, '\\n', '') AS executed"
    " FROM performance_schema.global_status WHERE variable_name = 'Uptime'"
)
_PROMISE = "SELECT epoch, controller FROM schemaless.promise WHERE server_id = @@server_id"
"""A row of another server_id came with a copy of that server's data, and promises nothing."""


class Observed(msgspec.Struct, frozen=True):
    """What one look at a server shows.

    `started_at`, in seconds since the epoch, tells starts apart, if not two in one second. `tables` is False while ours
    aren't made there. `executed` and `received` are positions, which only `Server.lacks` compares. What was received
    contains what was executed. `writes_as` is how positions name the server.
    """

    server_id: int
    started_at: int
    mariadb: bool
    read_only: bool
    tables: bool
    promise: Ballot | None
    appointments: list[Appointment]
    replication: ReplicationStatus | None
    executed: str
    received: str
    writes_as: str = ""


class Server:
    """A connection that only looks. Once it is lost, everything raises StorageUnavailable."""

    def __init__(self, node: Node, timeout_s: float = LOOK_TIMEOUT_S) -> None:
        self.node = node
        self._session = AdminSession(node, connect_timeout_s=CONNECT_TIMEOUT_S, timeout_s=timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._session.close()

    def look(self) -> Observed:
        """In one round trip, because every server is looked at a few times a second."""
        mariadb = self._session.mariadb
        shown_by_all = f"{SHOW_REPLICATION};{_LOOK_MARIADB if mariadb else _LOOK_MYSQL}"
        try:
            shown, (row,), promised, appointed = self._session.results(f"{shown_by_all};{_PROMISE};{ALL}")
            tables = True
        except TableMissing:
            (shown, (row,)), promised, appointed, tables = self._session.results(shown_by_all), [], [], False
        replication = self._session.status_of(shown)
        received = replication.received if replication else ""
        return Observed(
            row["server_id"],
            int(row["started_at"]),
            mariadb,
            bool(row["read_only"]),
            tables,
            Ballot(**promised[0]) if promised else None,
            [TABLE.decode(one.values()) for one in appointed],
            replication,
            row["executed"],
            ",".join(filter(None, (row["executed"], received))),
            row["writes_as"],
        )

    def lacks(self, have: str, wanted: str, but_of: str = "") -> str:
        """Returns what the position `have` lacks of another one of the same kind of server, '' if it contains it.
        `but_of` names a server whose own writes don't count.

        What a new master lacks of the old one's position is the old one's tail.
        """
        if self._session.mariadb:
            return lacks_mariadb(have, wanted, but_of)
        return ",".join(part for part in self._subtract(wanted, have) if not but_of or not part.startswith(but_of))

    def lacks_own(self, seen: Observed, wanted: str) -> str:
        """Returns what a server lacks of its own writes that the position `wanted` has, '' if it has them.

        Its data were restored, and it would never receive them: replication leaves out what has a server's own id.
        """
        if self._session.mariadb:
            return lacks_own_mariadb(seen.executed, wanted, int(seen.writes_as))
        return ",".join(part for part in self._subtract(wanted, seen.executed) if part.startswith(seen.writes_as))

    def _subtract(self, position: str, other: str) -> list[str]:
        (row,) = self._session.query("SELECT GTID_SUBTRACT(%s, %s) AS missing", position, other)
        return str(row["missing"]).replace("\n", "").split(",")

    def heads(self) -> dict[tuple[str, int], Location]:
        """Returns the head of each shard that lives on the server's cluster, by datastore and shard."""
        rows = self._session.query("SELECT datastore, shard, generation, head FROM schemaless.shard_head")
        return {(row["datastore"], row["shard"]): Location(row["generation"], row["head"]) for row in rows}

    def has_opened(self, epoch: int) -> bool:
        """Returns whether all heads have an epoch or a later one: the master was opened since it was appointed. A
        generation's number is the epoch that it began under.
        """
        return not self._session.query("SELECT 1 FROM schemaless.shard_head WHERE epoch < %s LIMIT 1", epoch)

    def _promise(self) -> Ballot | None:
        rows = self._session.query(_PROMISE)
        return Ballot(**rows[0]) if rows else None

    def hold(self, lock: str) -> int:
        """Takes a lock until this session ends, and returns the descriptor of its connection. A child that inherits it
        keeps the lock when this process is killed. Raises StateConflict when another session has the lock for longer
        than a server needs to see that its client is gone.
        """
        (row,) = self._session.query("SET SESSION wait_timeout = 28800; SELECT GET_LOCK(%s, 1) AS locked", lock)
        if not row["locked"]:
            raise StateConflict(f"another controller holds {lock} on {self.node.name}")
        return self._session.fileno()

    def long_statement(self) -> str:
        """Returns a statement that runs for longer than a second, '' without one. A fence would wait for its end."""
        running = [one for one in self._sessions() if one["Command"] in ("Query", "Execute") and one["Time"] > 1]
        return next((f"{one['Info'] or one['State']} ({one['Time']} s)"[:200] for one in running), "")

    def _sessions(self) -> list[dict[str, Any]]:
        return self._session.query("SHOW PROCESSLIST")

    def appoint(self, appointments: Iterable[Appointment]) -> None:
        """Writes who is master, except where the server knows of a higher rank. It needs no promise for that."""
        self._session.query("SET sql_log_bin = 0")
        for one in appointments:
            taken = commas([f"{column} = {literal(value)}" for column, value in TABLE.values(one).items()])
            rank = literals(*one.ballot, one.revision)
            self._session.query(
                f"{TABLE.insert([one], 'INSERT IGNORE')};UPDATE {TABLE.name} SET {taken}"
                f" {where(cluster=one.cluster)} AND (epoch, controller, revision) < {rank}"
            )

    def note(self, steps: Sequence[Step]) -> None:
        """Writes what controllers did, where it isn't written yet."""
        self._session.query("SET sql_log_bin = 0")
        self._session.query(STEPS.insert(steps, "INSERT IGNORE"))

    def note_state(self, state: ClusterState) -> None:
        """Writes what the controller makes of a cluster, unless a later word is there."""
        self._session.query("SET sql_log_bin = 0")
        self._session.query(STATES.newest(state))

    def last_step(self, cluster: str, names: Sequence[str]) -> Step | None:
        """Returns the latest step of these names that the server knows."""
        rows = self._session.query(
            f"SELECT {STEPS.select} FROM {STEPS.name} {where(cluster=cluster, step=names)} ORDER BY at DESC LIMIT 1"
        )
        return STEPS.decode(rows[0].values()) if rows else None


def lacks_mariadb(have: str, wanted: str, but_of: str = "") -> str:
    """Returns the newest transaction of each domain of `wanted`, where `have` has no such one of the same server.

    Each position has the last transaction of every server that wrote to the history. A sequence number alone says
    nothing: two histories that parted give the same ones. A server that was copied without its binary log doesn't know
    the writers before, so it seems to lack what they wrote last.
    """
    known = {(domain, server): number for domain, server, number in sorted(_transactions(have))}
    counts = [one for one in _transactions(wanted) if str(one[1]) != but_of]
    newest = {domain: (number, server) for domain, server, number in sorted(counts, key=lambda one: one[2])}
    return ",".join(
        f"{domain}-{server}-{number}"
        for domain, (number, server) in newest.items()
        if known.get((domain, server), 0) < number
    )


def lacks_own_mariadb(have: str, wanted: str, server: int) -> str:
    """Returns the transactions of one server that `wanted` has, and `have` doesn't reach: at most one of each domain.

    A copy of another server without its binary log names only the last writer. It has all below that.
    """
    reached: dict[int, int] = {}
    for domain, _, number in sorted(_transactions(have), key=lambda one: (one[1] == server, one[2])):
        reached[domain] = number  # the last of its own, or else the last of anybody
    lacking = {
        (domain, number)
        for domain, writer, number in _transactions(wanted)
        if writer == server and reached.get(domain, 0) < number
    }
    return ",".join(f"{domain}-{server}-{number}" for domain, number in sorted(lacking))


def _transactions(position: str) -> Iterator[tuple[int, int, int]]:
    """Returns domain, server and sequence number of each transaction that a position names."""
    for transaction in filter(None, position.split(",")):
        domain, server, number = transaction.split("-")
        yield int(domain), int(server), int(number)


@contextmanager
def acting(node: Node, ballot: Ballot) -> Iterator[Acting]:
    """Obtains the server's promise, and yields what may act on it until it ends.

    It ends the session of another controller. Raises Outvoted where a higher ballot was promised, or an equal epoch to
    another controller. Raises StorageUnavailable.
    """
    server = Acting(node, ballot)
    try:
        server._begin()
        yield server
    finally:
        server.close()


class Acting(Server):
    """The acts of one ballot on one server. Each may be repeated. `acting` makes it.

    Rows that concern this server alone are written unlogged: replicated, they would be another server's.
    """

    def __init__(self, node: Node, ballot: Ballot) -> None:
        super().__init__(node, ACT_TIMEOUT_S)
        self.ballot = ballot
        self._is_empty = False

    def stop_receiving(self) -> None:
        """Goes on to apply what was received. An applier that was stopped without an error starts first: MariaDB drops
        what was received once one starts that stood while nothing receives.
        """
        replication = self.look().replication
        if replication is not None and replication.receiving and not replication.applying and not replication.failed:
            self._act("START REPLICA SQL_THREAD")
        self._act("STOP REPLICA IO_THREAD")

    def stop_following(self) -> None:
        """Stops to receive and to apply. Returns once the transaction that is being applied has ended."""
        self._act("STOP REPLICA")

    def apply_received(self, timeout_s: float) -> str:
        """Returns the executed position once it contains all that was received.

        A restart drops what wasn't applied. So does MariaDB when an applier starts that stood while nothing was
        received. So the caller compares the position with the one that it saw before. Raises NotWhole when the server
        is late, or its applier has stopped.
        """
        self._verify()
        deadline = time.monotonic() + timeout_s
        while missing := self.lacks((seen := self.look()).executed, seen.received):
            if seen.replication and not seen.replication.applying:
                raise NotWhole(
                    f"{self.node.name} doesn't apply {missing}: {seen.replication.error or 'it was stopped'}"
                )
            if time.monotonic() > deadline:
                raise NotWhole(f"{self.node.name} hasn't applied {missing} after {timeout_s} s")
            time.sleep(POLL_S)
        return seen.executed

    def detach(self) -> None:
        """Forgets the master. What was received and not applied is dropped."""
        self._act("STOP REPLICA; RESET REPLICA ALL")

    def fence(self) -> None:
        """Lets no service write any more. No row is added after it returned, and no service has a transaction.

        `read_only` waits for commits under way. Raises LockTimeout, and changes nothing, where a statement takes longer
        than a second.
        """
        self._act("SET GLOBAL read_only = ON")
        spared = (self.node.user, "system user", "event_scheduler")
        self._end([one["Id"] for one in self._sessions() if one["User"] not in spared and not _sends_its_log(one)])

    def follow(self, host: str, port: int, user: str, password: str) -> None:
        """Names another master. The server stopped following before. What it hadn't applied then is dropped.

        MariaDB refuses to receive where the server has a tail. MySQL doesn't, so the caller asks `lacks`.
        """
        self._verify()
        self._session.follow(host, port, user, password)

    def start_receiving(self) -> None:
        """Starts the applier, too."""
        self._act("START REPLICA")

    def cut_off(self) -> None:
        """Ends the sessions of the minions that follow. Those that weren't told otherwise come back after a second."""
        self._verify()
        self._end([one["Id"] for one in self._sessions() if _sends_its_log(one)])

    def open_heads(self, epoch: int, generation: int = 0) -> None:
        """Gives an epoch to all heads, in one transaction that minions receive.

        With `generation` each shard that hadn't this epoch yet begins it after its head. Generations between begin
        there, too, so that none has a gap. Raises Misconfigured when such a shard has it or a higher one. After an
        error the session is in the open transaction, which its end undoes.
        """
        self._act("SET sql_log_bin = 1")
        self._session.query("BEGIN")
        if generation:
            self._open_generation(epoch, generation)
        self._session.query("UPDATE schemaless.shard_head SET epoch = %s", epoch)
        self._session.query("COMMIT")
        self._session.query("SET sql_log_bin = 0")

    def open(self) -> None:
        """Lets services write. Commits were made durable before."""
        self.make_durable()
        self._act("SET GLOBAL read_only = OFF")

    def make_durable(self) -> None:
        self._act("SET GLOBAL innodb_flush_log_at_trx_commit = 1; SET GLOBAL sync_binlog = 1")

    def _begin(self) -> None:
        """The promise is read before the lock is taken, so that a late controller doesn't end the session of the next.
        A server without tables never followed anybody. It has nothing to promise with, and nothing to lose.

        It is durable when it is written: a server that forgot one in a power cut would obey two controllers.
        """
        self._session.query("SET sql_log_bin = 0")
        if not self.look().tables:
            self._is_empty = True
            return
        self._require_lower_promise()
        self._lock()
        self._require_lower_promise()
        self._session.query("SET GLOBAL innodb_flush_log_at_trx_commit = 1")
        self._session.query(
            "REPLACE INTO schemaless.promise (server_id, epoch, controller, promised_at)"
            " VALUES (@@server_id, %s, %s, UTC_TIMESTAMP(6))",
            self.ballot.epoch,
            self.ballot.controller,
        )

    def _lock(self) -> None:
        deadline = time.monotonic() + END_TIMEOUT_S
        while time.monotonic() < deadline:
            (row,) = self._session.query("SELECT IS_USED_LOCK(%s) AS holder", LOCK)
            if row["holder"] is not None:
                self._end([row["holder"]])
            if self._session.query("SELECT GET_LOCK(%s, 1) AS locked", LOCK)[0]["locked"]:
                return
        raise StorageUnavailable(f"{self.node.name}: other controllers take the lock {LOCK} again and again")

    def _require_lower_promise(self) -> None:
        if (promise := self._promise()) and promise != self.ballot and promise.epoch >= self.ballot.epoch:
            raise Outvoted(f"{self.node.name} promised ballot {promise}: it refuses {self.ballot}", promise.epoch)

    def _verify(self) -> None:
        """Raises Outvoted when the promise isn't ours any more: the row was lost, or written without the lock."""
        if not self._is_empty and (promise := self._promise()) != self.ballot:
            raise Outvoted(
                f"{self.node.name} has promise {promise}, not {self.ballot}", promise.epoch if promise else 0
            )

    def _act(self, script: str, *values: object) -> None:
        self._verify()
        self._session.query(script, *values)

    def _open_generation(self, epoch: int, generation: int) -> None:
        (row,) = self._session.query(
            "SELECT MIN(generation) AS lowest, MAX(generation) AS highest FROM schemaless.shard_head"
            " WHERE epoch < %s AND moved_to IS NULL FOR UPDATE",
            epoch,
        )
        if row["highest"] is None:
            return
        if row["highest"] >= generation:
            raise Misconfigured(f"{self.node.name} has shards of generation {row['highest']}: {generation} can't begin")
        late = f"WHERE epoch < {epoch} AND moved_to IS NULL"
        numbers = " UNION ALL ".join(
            f"SELECT {number} AS number" for number in range(row["lowest"] + 1, generation + 1)
        )
        self._session.query(
            "INSERT INTO schemaless.shard_generation (datastore, shard, generation, starts_at, opened_at)"
            " SELECT datastore, shard, number, head + 1, UTC_TIMESTAMP(6)"
            f" FROM schemaless.shard_head JOIN ({numbers}) AS numbers ON number > generation {late};"
            f"UPDATE schemaless.shard_head SET generation = {generation} {late}"
        )

    def _end(self, sessions: Sequence[int]) -> None:
        """Returns once these sessions are gone. Raises StorageUnavailable when one isn't."""
        for one in sessions:
            try:
                self._session.query(f"KILL {one}")
            except NodeRefuses:  # it has ended, or we may not, and then it stays
                continue
        deadline = time.monotonic() + END_TIMEOUT_S
        while left := {one["Id"] for one in self._sessions()} & set(sessions):
            if time.monotonic() > deadline:
                raise StorageUnavailable(f"{self.node.name}: sessions {sorted(left)} don't end")
            time.sleep(POLL_S)


def _sends_its_log(session: dict[str, Any]) -> bool:
    """True for the session of a minion that follows."""
    return str(session["Command"]).startswith("Binlog Dump")
