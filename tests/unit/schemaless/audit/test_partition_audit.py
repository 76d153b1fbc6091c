"""The audit's reading of one partition, without servers: generations and records that do not belong there (I13)."""

import msgspec
import pytest

from schemaless.audit.partition_audit import PartitionAudit, ShardComparison, fingerprint
from schemaless.audit.report import FindingKind, Findings, ShardReport
from schemaless.cell import Erased, row_key_text
from schemaless.codec import encode_record
from schemaless.location import GenerationStart
from schemaless.record import Record
from schemaless.topology import Datastore
from tests.topic_harness import stored_cell

EXTRA, UNPUBLISHED = FindingKind.TOPIC_EXTRA, FindingKind.TOPIC_MISSING
FIRST, SECOND, THIRD = GenerationStart(1, 1), GenerationStart(2, 5), GenerationStart(3, 3)


def cell_record(cell):
    headers = {"v": b"1", "kind": b"cell", "column": cell.column_name.encode()}
    return Record(
        "cells", 0, 0, cell.created_at // 1000, row_key_text(cell.row_key).encode(), encode_record(cell), headers
    )


def announcement(start, shard=0):
    value = msgspec.msgpack.encode({"shard": shard, "generation": start.generation, "starts_at": start.starts_at})
    return Record("cells", 0, 0, 0, None, value, {"v": b"1", "kind": b"generation"})


def read(starts, stored, records):
    """Returns the findings and the report of shard 0, whose log has the `stored` cells. The partition is whole."""
    findings = Findings()
    report = ShardReport(0, starts[-1].generation, stored[-1].added_id)
    comparison = ShardComparison(report, map(fingerprint, stored), findings, None)
    datastore = Datastore("mezzanine", 2, 2, ("a",))
    audit = PartitionAudit(datastore, 0, {0: comparison}, {0: starts, 1: [FIRST]}, findings, cut=False)
    for record in records:
        audit.take(record)
    audit.finish()
    return [(finding.kind, finding.shard) for finding in findings.named], report


OLD = [stored_cell(0, added_id) for added_id in range(1, 8)]
SINCE_5 = [stored_cell(0, added_id, 2) for added_id in (5, 6)]
SINCE_3 = [stored_cell(0, added_id, 3) for added_id in (3, 4)]
OLD_RECORDS, NEW_RECORDS = [[cell_record(cell) for cell in cells] for cells in (OLD, SINCE_5)]


def test_superseded_records_are_listed_apart():
    """Three cells of the first generation came before the second began. That is no finding."""
    found, report = read([FIRST, SECOND], OLD[:4] + SINCE_5, [*OLD_RECORDS, announcement(SECOND), *NEW_RECORDS])
    assert (found, dict(report.superseded_by_generation), report.matched) == ([], {1: 3}, 6)


def test_a_later_generation_that_starts_lower_supersedes_both():
    """Cells of the first and of the second generation are listed, each under its own."""
    records = [*OLD_RECORDS, announcement(SECOND), *NEW_RECORDS, announcement(THIRD), *map(cell_record, SINCE_3)]
    found, report = read([FIRST, SECOND, THIRD], OLD[:2] + SINCE_3, records)
    assert (found, dict(report.superseded_by_generation)) == ([], {1: 5, 2: 2})


def test_a_generation_that_a_restored_master_forgot_is_superseded_as_a_whole():
    """It was announced at 5. The log knows only that the third generation begins at 3, and the second with it."""
    records = [*OLD_RECORDS, announcement(SECOND), *NEW_RECORDS, announcement(THIRD), *map(cell_record, SINCE_3)]
    found, report = read([FIRST, GenerationStart(2, 3), THIRD], OLD[:2] + SINCE_3, records)
    assert (found, dict(report.superseded_by_generation)) == ([], {1: 5, 2: 3})


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([*OLD_RECORDS, *NEW_RECORDS], [(UNPUBLISHED, 0)]),
        ([*OLD_RECORDS, announcement(SECOND), announcement(SECOND), *NEW_RECORDS], [(EXTRA, 0)]),
        ([*OLD_RECORDS, announcement(SECOND), OLD_RECORDS[-1], *NEW_RECORDS], [(EXTRA, 0)]),
        ([*OLD_RECORDS[:3], announcement(SECOND), *NEW_RECORDS], [(UNPUBLISHED, 0)]),
        ([*OLD_RECORDS, announcement(GenerationStart(2, 4)), announcement(SECOND), *NEW_RECORDS], [(EXTRA, 0)]),
        ([*OLD_RECORDS, announcement(SECOND), announcement(FIRST, shard=1), *NEW_RECORDS], [(EXTRA, 1)]),
    ],
    ids=["unannounced", "announced twice", "late", "not whole", "never opened", "another partition's shard"],
)
def test_what_breaks_the_order_of_generations_is_named(records, expected):
    """The second generation begins at 5, and everything else is as it should be."""
    found, _ = read([FIRST, SECOND], OLD[:4] + SINCE_5, records)
    assert found == expected


def test_a_cell_whose_body_is_erased_differs_in_nothing_else():
    """I19: MySQL has lost the body and the topic may still have it, or was given a cell without one."""
    stubs = [msgspec.structs.replace(cell, body=b"", erased=Erased(7, 1)) for cell in OLD]
    published = [cell_record(cell) for cell in stubs]
    for record in published:
        record.headers["kind"] = b"erased"
    found, report = read([FIRST], [*OLD[:2], *stubs[2:]], [*OLD_RECORDS[:4], *published[4:]])
    assert (found, report.matched) == ([], 7)
    moved = [msgspec.structs.replace(cell, created_at=cell.created_at + 1) for cell in stubs]
    assert read([FIRST], moved, OLD_RECORDS)[0] == [(FindingKind.TOPIC_DIFFERS, 0)] * 7
    assert read([FIRST], OLD, published)[0] == [(FindingKind.TOPIC_DIFFERS, 0)] * 7
    lost = [msgspec.structs.replace(cell, body=b"") for cell in OLD]
    assert read([FIRST], lost, OLD_RECORDS)[0] == [(FindingKind.TOPIC_DIFFERS, 0)] * 7
