"""The one tree of errors. Foreign errors are translated into it where an adapter meets them, cause kept (I15).

SchemalessError
├── InvalidRequest          the caller sent something that can never succeed
│   ├── Malformed           the payload can't be parsed at all
│   ├── Invalid             parsed, but a field is wrong
│   ├── TooLarge            over a limit on bytes
│   └── UnsupportedMedia    in a media type that isn't read here
├── Unauthenticated         no token, or one that isn't valid
├── Forbidden               the token may not do this
│   └── ForeignOrigin       a web page of another origin may not write
├── Misdirected             the request names a host that isn't this server
├── NotFound                no such datastore, shard or index
│   └── CellMissing         no cell under that key or in that column
├── CellErased              the body was removed for good (I19)
├── Conflict                another body is stored under that key (I1)
│   ├── KeyErased           the body under that key was removed: no put brings one back (I19)
│   └── StateConflict       an index, a version of it or a token is in a state that doesn't allow this
├── LocationGone            past the head, superseded, or of an unknown generation (I13)
├── NotReady                exists, but can't answer yet: an index that is building
│   └── InUse               something still runs that uses it
├── NotBuilt                in the contract, but not built yet
├── Unavailable             a server that is needed is unreachable, or too busy: try again
│   ├── NotRepeatable       so was one that a POST without Idempotency-Key needed; a second one may write a second cell
│   ├── StorageUnavailable  a MySQL server can't be reached, hangs or restarts
│   │   ├── AccountRefused  it runs, and doesn't let our account in
│   │   └── NodeRefuses     it answers, and can't do this now: a right or a resource is missing
│   │       ├── StatementTimeout  a statement took longer than it may
│   │       ├── TableMissing  it has no such table or database
│   │       ├── RefusedForGood  it would refuse the same statement again: the statement doesn't fit its tables or rights
│   │       ├── StaleTopology  it isn't the master that this process takes it for
│   │       │   └── ShardsMoved  it isn't these shards' home
│   │       ├── NotDurable  a master's settings may lose what it acknowledges
│   │       ├── NotWhole    it doesn't show all that the log has up to its head
│   │       │   └── LostHistory  it lacks what was published
│   │       ├── LockTimeout  another session held a row or a table for too long
│   │       ├── ShardsLocked  another session holds the heads or tables of some shards
│   │       ├── PacketTooLarge  a statement is larger than its max_allowed_packet
│   │       └── ClockAhead  its clock is ahead of ours and of the other masters'
│   ├── Overloaded          this process has too much to do: that says nothing about a server
│   └── BusUnavailable      Kafka can't be reached
│       └── TopicMissing    the topic was not made yet, or deleted
├── TooManyRequests         more than a caller may send in a second
├── Busy                    MySQL rolled the transaction back, for example after a deadlock: run it again
├── DuplicateKey            an INSERT met a unique key; stays inside the storage adapter
├── NeedsLockedHeads        an INSERT met a NULL for a missing head or a late clock; stays inside the storage adapter
├── CallHangs               a trigger function doesn't return; its process ends and is started again
├── Fenced                  another process owns the work now; this one must stop (I7, I10)
│   └── Outvoted            a server promised to obey another controller
├── Misconfigured           formats, counts or settings that don't fit; an operator has to act
│   ├── NameTaken           a trigger program's name belongs to another program
│   ├── BusRefuses          Kafka refuses our account, or what it asks for
│   └── MissingExtra        a package of an extra of the wheel isn't installed; an ImportError too
└── Corrupt                 stored data contradicts a promise; stop and look
    └── UnreadableCell      the stored body of a cell can't be decoded
"""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar


class SchemalessError(Exception):
    """Base of all errors that leave our code.

    `retryable` says whether the very same request may succeed later. `hint` says what a person should do. Whoever
    raises an error gives its own `hint` where that of the class isn't true.
    """

    retryable: ClassVar[bool] = False
    hint: str = ""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    """HTTP headers of a response with this error: which node said so."""

    def __init__(self, *args: object, hint: str | None = None) -> None:
        super().__init__(*args)
        if hint is not None:
            self.hint = hint


class InvalidRequest(SchemalessError):
    hint = "correct the request: sent again unchanged it fails again"


class Malformed(InvalidRequest):
    pass


class Invalid(InvalidRequest):
    """`field` names the part of path, query or body that is wrong."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"{field}: {why}")
        self.field = field
        self.why = why


class TooLarge(InvalidRequest):
    pass


class UnsupportedMedia(InvalidRequest):
    pass


class Unauthenticated(SchemalessError):
    hint = "send `Authorization: Bearer TOKEN`: `schemaless token create` on the server makes a token"
    headers = ((b"www-authenticate", b'Bearer realm="schemaless"'),)


class Forbidden(SchemalessError):
    hint = "ask an administrator for a token with that scope and datastore"


class ForeignOrigin(Forbidden):
    hint = "name the page's origin in SCHEMALESS_API_ORIGINS if it may write"


class Misdirected(SchemalessError):
    hint = "use the server's own name, or list the one that you use in SCHEMALESS_API_HOSTS"


class NotFound(SchemalessError):
    hint = "check the name: nothing of that name exists here"


class CellMissing(NotFound):
    hint = (
        "nothing is stored there. A put that was answered `buffered` can be read once the cleaner has brought it home"
    )


class Conflict(SchemalessError):
    hint = "a cell never changes: write the new body under a higher ref_key"


class CellErased(SchemalessError):
    """`erasure` is its id, and `erased_at` when it was, in microseconds since the epoch."""

    hint = "`schemaless erase status` says why, and where the body may still be"

    def __init__(self, what: str, erasure: str, erased_at: int) -> None:
        super().__init__(what)
        self.erasure = erasure
        self.erased_at = erased_at


class KeyErased(Conflict):
    """`erasure` is the erasure's id, and `erased_at` when it was, in microseconds since the epoch."""

    hint = "the key stays taken: write a new body under a higher ref_key"

    def __init__(self, what: str, erasure: str, erased_at: int) -> None:
        super().__init__(what)
        self.erasure = erasure
        self.erased_at = erased_at


class StateConflict(Conflict):
    hint = "do first what the message says: nothing was changed"


class LocationGone(SchemalessError):
    """A location that can't be read from. `head` and `resume_at` are added_ids: a reader continues from `resume_at`."""

    hint = "continue from resume_at"

    def __init__(self, why: str, *, head: int, resume_at: int, generation: int) -> None:
        super().__init__(why)
        self.hint = f"continue from resume_at, which is {resume_at}"
        self.head = head
        self.resume_at = resume_at
        self.generation = generation


class NotReady(SchemalessError):
    retryable = True
    hint = "try again when it is ready: the response says how far it is"


class InUse(NotReady):
    hint = "stop what uses it, and send the request again"


class NotBuilt(SchemalessError):
    hint = "do without it: this call is in the contract, but not built yet"


class Unavailable(SchemalessError):
    retryable = True
    hint = "send the same request again: reads and puts are idempotent, and so is a POST with an Idempotency-Key"


class NotRepeatable(Unavailable):
    retryable = False
    hint = "look whether the version was written before you send it again, and send an Idempotency-Key with each POST"


class StorageUnavailable(Unavailable):
    hint = "look at the server that the message names. What is stored is safe, and the same may be asked again"


class AccountRefused(StorageUnavailable):
    """A MySQL server runs, and refuses the account that its topology file names.

    `shown` names server and account, and is all that a caller over HTTP is shown.
    """

    hint = (
        "name the account's present password in the topology's file: no process has to be started again"
        " (docs/production.md#rotating-passwords)"
    )

    def __init__(self, why: str, shown: str = "") -> None:
        super().__init__(why)
        self.shown = shown


class NodeRefuses(StorageUnavailable):
    """A MySQL server answered with an error that isn't the caller's, known to us or not (I15).

    The next node may do what this one can't. The server is reachable, so no circuit breaker opens.
    """

    hint = "look at the server that the message names: it lacks a table, a right or a resource"


class StatementTimeout(NodeRefuses):
    """A server gave a statement up that took longer than it may. The transaction is still open."""


class TableMissing(NodeRefuses):
    hint = "wait until the datastore is made, and replicated to the server that the message names"


class RefusedForGood(NodeRefuses):
    """A MySQL server refuses a statement for a reason that doesn't pass by itself."""

    hint = "look at the statement and the rights that the message names: sent again unchanged it fails again"


class StaleTopology(NodeRefuses):
    """A server takes no writes, or not those of a process that doesn't know the latest appointment of a master."""

    hint = "try again: the next look finds the master. `schemaless topology show` tells who it is"


class ShardsMoved(StaleTopology):
    """A server isn't home to these shards any longer."""

    hint = "try again: the next look finds their home"

    def __init__(self, why: str, shards: Collection[int] = ()) -> None:
        super().__init__(why)
        self.shards = frozenset(shards)


class ForeignFormat(NodeRefuses):
    """The databases of a server have another format than this program knows. It is neither read nor written to."""

    hint = "use the release that made the databases of the server that the message names, or make that server anew"


class NotDurable(NodeRefuses):
    """A master is not written to, because a crash of its machine may lose what it acknowledged (I5)."""

    hint = "correct the settings that the message names, or set SCHEMALESS_MYSQL_LOSSY_MASTERS"


class NotWhole(NodeRefuses):
    """A server doesn't show all that the log has up to the head that it shows (I3).

    `database` and `added_id` name a cell that it lacks, where one is known.
    """

    hint = "correct what the message names, and make the minion anew: what it skipped doesn't come by itself"

    def __init__(self, why: str, database: str = "", added_id: int = 0) -> None:
        super().__init__(why)
        self.database = database
        self.added_id = added_id


class LostHistory(NotWhole):
    """A master lacks what was published, and so do its minions."""

    hint = "restore a newer copy, or open it by hand and begin a new generation: docs/failover.md"


class LockTimeout(NodeRefuses):
    """Another session held a row or a table for longer than a lock is waited for. `statement` counts from 0."""

    hint = "try again, and look who holds it: SHOW FULL PROCESSLIST on the server that the message names"

    def __init__(self, why: str, statement: int = 0) -> None:
        super().__init__(why)
        self.statement = statement


class PacketTooLarge(NodeRefuses):
    hint = "raise max_allowed_packet of the server that the message names to 16 MiB or more"


class ShardsLocked(NodeRefuses):
    """Another session held the heads or the tables of these shards for longer than a lock is waited for."""

    hint = "try again: a transaction that holds heads and does nothing is ended after some seconds"

    def __init__(self, why: str, shards: Collection[int] = ()) -> None:
        super().__init__(why)
        self.shards = frozenset(shards)


class ClockAhead(NodeRefuses):
    hint = "set the clock of the server that the message names: one insert would freeze the time of a shard"


class Overloaded(Unavailable):
    hint = "send it again after a moment, or to another process: this one has too much to do"


class BusUnavailable(Unavailable):
    hint = "check Kafka: nothing is lost, and work continues when it can be reached again"


class TopicMissing(BusUnavailable):
    hint = "start a tailer, which makes the topic: it was not made yet, or it was deleted"


class TooManyRequests(SchemalessError):
    retryable = True
    hint = "send fewer at once: wait as long as Retry-After says"


class Busy(SchemalessError):
    retryable = True
    hint = "run the transaction again"


class DuplicateKey(SchemalessError):
    hint = "read the row that exists and compare"


class NeedsLockedHeads(SchemalessError):
    """A NULL met a column that takes none. Only the insertion with user variables writes NULLs (storage/append.py)."""

    hint = "lock the heads, and look which one is missing or ahead of the clock"


class CallHangs(SchemalessError):
    hint = "the call is repeated: give the function time-outs of its own, or raise SCHEMALESS_CONSUMERS_CALL_LIMIT_S"


class Fenced(SchemalessError):
    hint = "wait until the work is assigned again: another process owns it now"


class Outvoted(Fenced):
    """A server obeys no controller below its promise. `epoch` is that of the promise."""

    hint = "look at the appointments that the servers show, and begin again with an epoch above the one that is named"

    def __init__(self, why: str, epoch: int) -> None:
        super().__init__(why)
        self.epoch = epoch


class Misconfigured(SchemalessError):
    hint = "correct what the message names"


class AnotherInstallation(Misconfigured):
    """What is in Kafka is of other databases than those that are read here (I20)."""

    hint = "give each its own Kafka, or its datastores other names: docs/production.md#installations-on-one-kafka"


class NameTaken(Misconfigured):
    hint = (
        "give this program a --name of its own, or, if it replaces the other one, --take-over once:"
        " it continues from the other's checkpoints"
    )


class BusRefuses(Misconfigured):
    hint = (
        "docs/security.md#kafka-accounts has the rights of each account: an administrator's"
        " `schemaless datastore grant NAME` gives them to ours"
    )


class MissingExtra(Misconfigured, ImportError):
    """Its text names the command that installs what is missing."""

    hint = ""


class Corrupt(SchemalessError):
    hint = "stop and look before anything is written: stored data contradicts a promise"


class UnreadableCell(Corrupt):
    """Its text names the cell and its location, and no server."""

    hint = "an operator has to act: `schemaless explain` and the nodes of its home show what is stored; read around it"
