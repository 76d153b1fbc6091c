"""The audit's comparison of one shard, without servers: each way in which a topic can differ is named."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemaless.audit.report import FindingKind, Findings, ShardReport
from schemaless.audit.shard_audit import Digest, ShardComparison


def compare(stored, topic, *, head=None, cut=False, findings_max=100):
    """`stored` and `topic`: added_ids, or (added_id, hash)."""
    findings = Findings(findings_max)
    report = ShardReport(7, 1, max([digest(item).added_id for item in stored], default=0) if head is None else head)
    comparison = ShardComparison(report, iter([digest(item) for item in stored]), findings, cut=cut)
    for item in topic:
        comparison.take(digest(item))
    complete = comparison.complete
    comparison.finish()
    return findings, report, complete


def digest(item):
    return Digest(*item) if isinstance(item, tuple) else Digest(item, b"same")


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
    """Cells older than the first record are not held; a hole behind it is missing all the same."""
    findings, report, _ = compare([1, 2, 3, 4, 5], [3, 5], cut=True)
    assert (report.not_held, report.held_from) == (2, 3)
    assert named(findings) == [(FindingKind.TOPIC_MISSING, "cell 4")]


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
