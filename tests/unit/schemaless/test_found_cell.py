"""One cell looks the same wherever a program meets it: from the client, the topic, a batch, a trigger function."""

import uuid
from datetime import UTC, datetime

import msgspec

from schemaless import Client, FoundCell, TriggerCell, decode_record
from schemaless.cell import StoredCell
from schemaless.codec import cell_view, encode_body, encode_record
from schemaless.found_cell import found_cell
from schemaless.location import Location
from schemaless.position import BEGINNING_DIGEST, Position
from schemaless.shard_cursor import ProvenPage
from schemaless.subscriber.engine import FollowedShards, ReadLog
from schemaless.triggers.decorator import trigger, triggers_of

ROW = uuid.UUID("5b1d5b2e-8d5a-4a3e-9a53-4f0f6a3f2a11")
STORED = StoredCell(ROW.bytes, "BASE", 3, 0, 1, 1, 1_767_225_600_000_007, encode_body({"fare": {"amount": 12.5}}))
HEADERS = {"v": b"1", "kind": b"cell", "column": b"BASE"}


def of_the_client():
    return msgspec.msgpack.decode(msgspec.msgpack.encode(cell_view(STORED)), type=FoundCell)


def of_the_topic():
    return decode_record(encode_record(STORED), HEADERS)


def of_a_batch():
    shards = FollowedShards(1, 1)
    shards.begin(0, 0, [Position(0, 1, 0)], to_end=True)
    steps = shards.catch_up([0])
    assert isinstance(next(steps), ReadLog)
    batch = steps.send({0: ProvenPage([STORED], Location(1, 1), BEGINNING_DIGEST)})
    (cell,) = batch.cells
    return cell


def of_a_trigger():
    got = []

    @trigger(column="BASE")
    def take(cell: TriggerCell) -> None:
        got.append(cell)

    (marked,) = triggers_of({"take": take})
    take(*marked.arguments(STORED, None))
    return got[0]


def test_a_cell_is_one_value_wherever_it_is_met():
    met = [of_the_client(), of_the_topic(), of_a_batch(), of_a_trigger()]
    assert met == [found_cell(STORED)] * 4
    assert {type(cell) for cell in met} == {FoundCell}


def test_its_members_have_the_types_that_programs_use():
    cell = of_the_topic()
    assert cell.row_key == ROW
    assert cell.created_at == datetime(2026, 1, 1, 0, 0, 0, 7, UTC)
    assert (cell.body, cell.fare["amount"], cell.absent) == ({"fare": {"amount": 12.5}}, 12.5, None)
    assert str(cell.location) == "0:1:1"


def test_a_location_goes_into_a_query():
    """After the cell of a trigger function, or of a batch."""
    requests = Client(["http://one"], datastore="m")._requests
    request = next(requests.query_index("fares", {"driver": ROW, "after": of_a_batch().location}))
    assert request.params["after"] == "0:1:1"
