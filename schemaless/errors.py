"""The one tree of errors. Foreign errors are translated into it where an adapter meets them, cause kept (I15).

SchemalessError
├── InvalidRequest          the caller sent something that can never succeed
│   ├── Malformed           the payload can't be parsed at all
│   ├── Invalid             parsed, but a field is wrong
│   ├── TooLarge            over a limit on bytes
│   └── UnsupportedMedia    in a media type that isn't read here
├── NotFound                no such datastore, shard or index
│   └── CellMissing         an empty place, which may be what the caller wants to know
├── Conflict                another body stands under that key (I1)
├── LocationGone            past the head, superseded, or of an unknown generation (I13)
├── NotReady                exists, but can't answer yet (an index that is building)
├── NotBuilt                in the contract, not built yet
├── Unavailable             something needed is away; try again
│   ├── StorageUnavailable  a MySQL server can't be reached, hangs or restarts
│   └── BusUnavailable      Kafka can't be reached
│       └── TopicMissing    the topic was not made yet, or deleted
├── Busy                    MySQL gave way to another transaction; the same transaction may be run again
├── DuplicateKey            a unique key stood in the way of an INSERT; stays inside the storage adapter
├── Fenced                  another process has taken over; this one must let go (I7, I10)
├── Misconfigured           an operator has to act: formats, counts, settings that don't fit
│   └── MissingExtra        a package of an extra of the wheel isn't installed; an ImportError too
└── Corrupt                 stored data contradicts a promise; stop, never guess
"""

from __future__ import annotations

from typing import ClassVar


class SchemalessError(Exception):
    """Base of all errors that leave our code.

    `retryable` tells whether the very same request may succeed later; `hint` tells a person what to do.
    """

    retryable: ClassVar[bool] = False
    hint: ClassVar[str] = ""


class InvalidRequest(SchemalessError):
    hint = "correct the request; sent again unchanged it fails again"


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


class NotFound(SchemalessError):
    hint = "check the name; nothing of that name exists here"


class CellMissing(NotFound):
    hint = "nothing was written there yet"


class Conflict(SchemalessError):
    hint = "a cell never changes: write the new body under a higher ref_key"


class LocationGone(SchemalessError):
    """A location that can't be read from; `head` and `resume_at` (an added_id) tell where to go on."""

    hint = "go on from resume_at"

    def __init__(self, why: str, *, head: int, resume_at: int, generation: int) -> None:
        super().__init__(why)
        self.head = head
        self.resume_at = resume_at
        self.generation = generation


class NotReady(SchemalessError):
    retryable = True
    hint = "try again when it is ready; the answer tells how far it is"


class NotBuilt(SchemalessError):
    hint = "this call is in the contract and not built yet"


class Unavailable(SchemalessError):
    retryable = True
    hint = "send the same request again: every put is idempotent"


class StorageUnavailable(Unavailable):
    pass


class BusUnavailable(Unavailable):
    hint = "Kafka can't be reached; nothing is lost, the work goes on when it is back"


class TopicMissing(BusUnavailable):
    hint = "the topic was not made yet, or deleted: a tailer makes it"


class Busy(SchemalessError):
    retryable = True
    hint = "run the transaction again"


class DuplicateKey(SchemalessError):
    hint = "read what stands there and compare"


class Fenced(SchemalessError):
    hint = "another process owns this work now; wait until it is given again"


class Misconfigured(SchemalessError):
    hint = "an operator has to act"


class MissingExtra(Misconfigured, ImportError):
    """Its text names the command that installs what is missing."""

    hint = ""


class Corrupt(SchemalessError):
    hint = "stop and look: stored data contradicts a promise"
