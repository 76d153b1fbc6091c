"""What `schemaless tail` makes of records: lines for what was asked for, words for what is wrong, hidden or not."""

import json
import zlib

import msgpack
import pytest

from schemaless.cell import StoredCell
from schemaless.cli.tail import TailFormat, TailView, parse_filter
from schemaless.codec import encode_body, encode_record
from schemaless.errors import Invalid
from schemaless.record import Record

ROW = "5b1d5b2e-8d5a-4a3e-9a53-4f0f6a3f2a11"
KEY = bytes.fromhex(ROW.replace("-", ""))


def cell(added_id, **members):
    made = {"column_name": "BASE", "shard": 0, "generation": 1, "created_at": 7, "body": encode_body({"n": added_id})}
    return StoredCell(row_key=KEY, ref_key=1, added_id=added_id, **(made | members))


def record(value, offset=0, kind=b"cell", partition=0):
    value = encode_record(value) if isinstance(value, StoredCell) else value
    return Record("t", partition, offset, 0, b"", value, {"v": b"1", "kind": kind})


class Told(list):
    """What a tail of one shard and partition wrote, and what it said."""

    def __init__(self, records, form=TailFormat.TEXT, complete=(), **wanted):
        super().__init__()
        asked = {"shards": (), "columns": (), "rows": (), "since": 0} | wanted
        self.tail = TailView(2, complete, parse_filter(**asked), form, self.append)
        self.lines = list(self.tail.take(records))


def test_a_cell_is_a_line_of_each_form():
    """For people as `log` has it, for programs as the API has it, or the value itself."""
    found = record(cell(4, shard=2), offset=9)
    assert Told([found]).lines == [f'2:1:4 {ROW} BASE 1 {{"n":4}}\n'.encode()]
    (line,) = Told([found], TailFormat.JSON).lines
    assert json.loads(line) == {
        **{"row_key": ROW, "column_name": "BASE", "ref_key": 1, "body": {"n": 4}},
        **{"shard": 2, "generation": 1, "added_id": 4, "created_at": "1970-01-01T00:00:00.000007Z"},
        **{"partition": 0, "offset": 9},
    }
    assert Told([found], TailFormat.MSGPACK).lines == [found.value]


def test_a_cell_without_a_body_says_so():
    """Its body was erased before it was published."""
    found = record(cell(4, body=b""), kind=b"erased")
    assert Told([found]).lines == [f"0:1:4 {ROW} BASE 1 erased\n".encode()]
    (line,) = Told([found], TailFormat.JSON).lines
    shown = json.loads(line)
    assert (shown["erased"], "body" in shown) == ({}, False)


def test_messagepack_values_follow_one_another():
    """Any unpacker that takes a stream reads them."""
    unpacker = msgpack.Unpacker()
    unpacker.feed(b"".join(Told([record(cell(n)) for n in (1, 2, 3)], TailFormat.MSGPACK).lines))
    assert [value["added_id"] for value in unpacker] == [1, 2, 3]


def test_filters_hide_cells_but_not_faults():
    """Column, row, shard and time; a hole among hidden cells is told."""
    records = [
        record(cell(1)),
        record(cell(2, column_name="STATUS")),
        record(cell(4, column_name="STATUS", created_at=9)),
    ]
    assert len(Told(records, columns=["STATUS"]).lines) == 2
    assert len(Told(records, since=8).lines) == 1
    assert len(Told(records, rows=[ROW]).lines) == 3
    assert len(Told(records, shards=[0]).lines) == 3
    hidden = Told(records, columns=["OTHER"])
    assert (hidden.lines, hidden.tail.faults, hidden.tail.records) == ([], 1, 3)
    assert hidden == ["HOLE in shard 0: cell 3 is missing before 1:4 (partition 0, offset 0)"]
    assert hidden.tail.summary() == "3 records verified: 1 FAULT"


def test_a_partition_that_is_whole_begins_with_the_first_cell():
    """Cut off at the beginning: no hole."""
    assert Told([record(cell(3))]) == []
    assert Told([record(cell(3))], complete={0}).tail.faults == 1


def test_what_is_not_ours_is_counted_and_named():
    """Bytes and kinds; nothing of it is a fault."""
    foreign = [record(b"x", offset=5), record(b"", kind=b"later")]
    told = Told([*foreign, record(cell(1))])
    assert (told.tail.foreign, told.tail.faults, len(told.lines)) == (2, 0, 1)
    assert told[0].startswith("not ours: t [0] offset 5: not a cell record")
    assert "kind b'later' is not known" in told[1]
    assert told.tail.summary() == "3 records verified: no hole, no repeat, no disorder, 2 foreign records"


def test_a_cell_in_a_wrong_partition_is_a_fault_and_verified_all_the_same():
    """Somebody wrote it, or raised the partitions under a tailer: a second copy is a repeat, too."""
    told = Told([record(cell(1, shard=1), partition=1), record(cell(1, shard=1))])
    assert (told.tail.foreign, told.tail.faults, len(told.lines)) == (0, 2, 2)
    assert told[0].startswith("WRONG PARTITION of 2: t [0] offset 0: shard 1 does not belong")
    assert told[1].startswith("REPEAT in shard 1")


def test_a_flood_of_foreign_records_is_counted_only():
    """Twenty are named."""
    told = Told([record(b"x")] * 100)
    assert (told.tail.foreign, len(told)) == (100, 21)


def test_a_body_that_no_json_can_tell_is_not_ours():
    """A cell that others wrote, with members under keys that JSON has not."""
    odd = zlib.compress(msgpack.packb({"a": {(1, 2): 3}}))
    told = Told([record(cell(1, body=odd))])
    assert (told.lines, told.tail.foreign, told.tail.faults) == ([], 1, 0)


def test_notices_are_told():
    """A new generation, which is no fault, and an operator's seek."""
    opening = msgpack.packb({"shard": 0, "generation": 2, "starts_at": 2})
    sought = msgpack.packb({"shard": 0, "generation": 1, "added_id": 0})
    told = Told([record(cell(1)), record(opening, kind=b"generation"), record(sought, kind=b"seek")])
    assert told[0] == "shard 0: generation 2 starts at 2"
    assert told[1].startswith("shard 0: an operator's seek to 1:0")
    assert told.tail.faults == 0


@pytest.mark.parametrize("wanted", [{"columns": ["?"]}, {"rows": ["1"]}])
def test_a_filter_that_can_match_nothing_is_refused(wanted):
    """A typing error must not look like an empty topic."""
    with pytest.raises(Invalid):
        Told([], **wanted)
