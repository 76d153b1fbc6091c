"""The audit's comparison of one shard, without servers: each way in which a topic can differ is named."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemaless.audit.partition_audit import Fingerprint, Published, ShardComparison, fingerprint
from schemaless.audit.report import FindingKind, Findings, ShardReport
from tests.topic_harness import stored_cell


def compare(stored, topic, *, head=None, published=None, first_held_at=None, findings_max=100):
    """`stored` and `topic`: added_ids, or (added_id, hash). A cell is created at its added_id."""
    findings = Findings(findings_max)
    report = ShardReport(7, 1, max([printed(item).added_id for item in stored], default=0) if head is None else head)
    comparison = ShardComparison(report, iter([printed(item) for item in stored]), findings, published)
    comparison.first_held_at = first_held_at
    for item in topic:
        comparison.take(printed(item), bytes)
    complete = comparison.complete
    comparison.finish()
    return findings, report, complete


def printed(item):
    added_id, content = item if isinstance(item, tuple) else (item, b"same")
    return Fingerprint(added_id, added_id, content)


def named(findings):
    return [(finding.kind, finding.detail) for finding in findings.named]


def test_equal_sides_are_clean():
    """Everything matched, nothing found."""
    findings, report, complete = compare([1, 2, 3], [1, 2, 3])
    assert (findings.total, report.matched, report.topic, report.held_from, complete) == (0, 3, 3, 1, True)


@pytest.mark.parametrize(
    ("stored", "topic", "expected"),
    [
        ([1, 2, 3], [1, 3], [(FindingKind.TOPIC_MISSING, "cell 2")]),
        ([1, 2, 3], [1, 2], [(FindingKind.TOPIC_MISSING, "cell 3")]),
        ([1, 2], [], [(FindingKind.TOPIC_MISSING, "cell 1"), (FindingKind.TOPIC_MISSING, "cell 2")]),
        ([1, 2, 3], [1, 2, 2, 3], [(FindingKind.TOPIC_EXTRA, "cell 2 comes again, or after cell 2")]),
        ([1, 3], [1, 2, 3], [(FindingKind.TOPIC_EXTRA, "cell 2 is not in MySQL")]),
        (
            [1, (2, b"a"), 3],
            [1, (2, b"b"), 3],
            [(FindingKind.TOPIC_DIFFERS, "cell 2 has another content than in MySQL")],
        ),
        (
            [1, 2, 3],
            [1, 3, 2],
            [(FindingKind.TOPIC_MISSING, "cell 2"), (FindingKind.TOPIC_EXTRA, "cell 2 comes again, or after cell 3")],
        ),
    ],
)
def test_each_difference_is_named(stored, topic, expected):
    """Missing, repeated, out of order, unknown to MySQL, of another content."""
    assert named(compare(stored, topic)[0]) == expected


def test_a_cut_topic_holds_less_and_misses_nothing():
    """Cells that progress counts are not held. A hole behind the first record is missing all the same."""
    findings, report, _ = compare([1, 2, 3, 4, 5], [3, 5], published=Published(5))
    assert (report.not_held, report.held_from) == (2, 3)
    assert named(findings) == [(FindingKind.TOPIC_MISSING, "cell 4")]


def test_cells_that_were_never_published_are_missing_in_a_cut_topic():
    """Nothing of the shard is held, and progress counts the first half: the second half is missing, however old."""
    findings, report, complete = compare(range(1, 101), [], published=Published(50), first_held_at=1000)
    assert (report.not_held, findings.counts, complete) == (50, {FindingKind.TOPIC_MISSING: 50}, False)
    assert named(findings)[0] == (FindingKind.TOPIC_MISSING, "cell 51")


def test_a_shard_that_was_published_and_cut_is_complete():
    """Nothing is left of it, and progress counts all of it: nobody waits for more."""
    findings, report, complete = compare([1, 2], [], published=Published(2))
    assert (report.not_held, findings.total, complete) == (2, 0, True)


def test_without_a_progress_record_only_cells_older_than_the_first_record_are_not_held():
    """A cell as old as the partition's first record, or newer, must be in the topic."""
    findings, report, _ = compare([1, 2, 3, 4], [4], published=Published(None), first_held_at=3)
    assert (report.not_held, named(findings)) == (2, [(FindingKind.TOPIC_MISSING, "cell 3")])


@pytest.mark.parametrize("first_held_at", [None, 3, 1000])
def test_a_shard_of_which_nothing_is_left_needs_a_progress_record(first_held_at):
    """Neither a record of it nor its progress: the audit says so, however old the cells are."""
    findings, _, _ = compare([1, 2, 3], [], published=Published(None), first_held_at=first_held_at)
    assert FindingKind.PROGRESS_WRONG in findings.counts


@pytest.mark.parametrize(
    "change",
    [
        {"row_key": b"another key 1234"},
        {"column_name": "STATUS"},
        {"ref_key": 2},
        {"shard": 1},
        {"generation": 2},
        {"added_id": 6},
        {"created_at": 1},
        {"body": b"other"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_member_of_a_cell_is_compared(change):
    """A record and a row that differ in one member have different fingerprints."""
    cell = stored_cell(0, 5)
    assert fingerprint(cell).hash != fingerprint(msgspec.structs.replace(cell, **change)).hash


def test_what_came_after_the_heads_were_fixed_is_left_out():
    """Records beyond the head are neither counted nor compared."""
    findings, report, complete = compare([1, 2], [1, 2, 3, 4], head=2)
    assert (findings.total, report.topic, complete) == (0, 2, True)


def test_findings_are_bounded_and_counted():
    """Of many findings the first are named, all are counted."""
    findings, _, _ = compare(range(1, 1001), [], findings_max=10)
    assert (len(findings.named), findings.total, findings.unnamed) == (10, 1000, 990)
    everything, _, _ = compare(range(1, 1001), [], findings_max=None)
    assert (len(everything.named), everything.unnamed) == (1000, 0)


@given(st.integers(0, 30), st.data())
def test_any_single_damage_is_seen(head, data):
    """Whatever one record is dropped, doubled, moved or altered, the comparison is not clean."""
    topic = list(range(1, head + 1))
    assert compare(topic, topic)[0].total == 0
    if not topic:
        return
    at = data.draw(st.integers(0, head - 1))
    dropped = topic[:at] + topic[at + 1 :]
    doubled = topic[: at + 1] + topic[at:]
    altered = [*topic[:at], (topic[at], b"other"), *topic[at + 1 :]]
    damaged = [dropped, doubled, altered]
    if at:
        damaged.append([*dropped[: at - 1], topic[at], *dropped[at - 1 :]])
    assert all(compare(topic, one)[0].total > 0 for one in damaged)
