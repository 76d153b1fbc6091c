"""The log of one shard as a value, through growth, promotions and restores. For tests without servers."""

from schemaless.cell import StoredCell
from schemaless.errors import LocationGone
from schemaless.location import GenerationStart, Location
from schemaless.position import BEGINNING_DIGEST, Position, cell_digest, verify_position
from schemaless.shard_cursor import ProvenPage


def cell(added_id, generation=1, ref_key=0):
    return StoredCell(b"r" * 16, "BASE", ref_key, 0, generation, added_id, created_at=0, body=b"")


def position(added_id, generation=1):
    if not added_id:
        return Position(0, generation, 0, digest=BEGINNING_DIGEST)
    return Position(0, generation, added_id, digest=cell_digest(cell(added_id, generation)))


FIRST = GenerationStart(1, 1)


class Log:
    """The log of one shard, as a master has it. A value: each change makes a new one."""

    def __init__(self, cells=(), starts=(FIRST,)):
        self.cells = tuple(cells)
        self.starts = tuple(starts)

    @property
    def head(self):
        return Location(self.starts[-1].generation, len(self.cells))

    def grown(self, ref_key=0):
        return Log((*self.cells, cell(len(self.cells) + 1, self.head.generation, ref_key)), self.starts)

    def promoted(self, starts_at):
        start = GenerationStart(self.head.generation + 1, starts_at)
        return Log(self.cells[: starts_at - 1], (*self.starts, start))

    def restored(self, kept):
        return Log(self.cells[:kept], self.starts)

    def generation_opened(self, starts_at):
        """As after a restore: the cells that were written since get the new generation."""
        new = self.head.generation + 1
        cells = [found if found.added_id < starts_at else cell(found.added_id, new, 7) for found in self.cells]
        return Log(cells, (*self.starts, GenerationStart(new, starts_at)))

    def read(self, at, limit=10):
        there = self.cells[at.added_id - 1 : at.added_id] if at.added_id else ()
        digest = cell_digest(there[0]) if there else None if at.added_id else BEGINNING_DIGEST
        try:
            verify_position(at, digest, self.starts, self.head)
        except LocationGone as gone:
            return gone
        return ProvenPage(self.cells[at.added_id : at.added_id + limit], self.head)


def log_of(count):
    log = Log()
    for _ in range(count):
        log = log.grown()
    return log
