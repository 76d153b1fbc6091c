"""What the API says of workers, from the rows that servers have."""

import msgspec

from api.views import worker_view, workers_in_all
from schemaless.facts.consumers import present_workers, stall_of, tailing_of, tailing_stall
from schemaless.names import INDEXER, TAILER, Stall
from schemaless.storage.worker_table import OldestCall, WaitingShard, WorkerReport, WorkerRow, _report

BILLING = "trigger:billing"
HANGS = WorkerReport(
    version="0.1.0",
    transport="plain",
    unconfirmed=(WaitingShard(BILLING, 3, "another process moved its checkpoint"),),
    unconfirmed_count=7,
    oldest_call=OldestCall("bill_rider", "a cell", 5, 40.0),
    calls=20,
    failures={"HTTPStatusError 429": 7},
)


def test_the_newest_row_of_each_process_counts_and_old_ones_are_left_out():
    """A minion that lags has an older one. A process that wasn't seen for long has ended."""
    old, new = WorkerRow(BILLING, 1, WorkerReport(), 9.0), WorkerRow(BILLING, 1, HANGS, 1.0)
    dead = WorkerRow(BILLING, 2, HANGS, 31.0)
    assert present_workers([[old, dead], [new], []]) == [new]


def test_a_call_grows_older_after_it_was_reported():
    row = WorkerRow(BILLING, 1, HANGS, 5.0)
    assert worker_view(row)["oldest_call"] == {"trigger": "bill_rider", "cell": "a cell", "shard": 5, "age_s": 45.0}
    other = WorkerReport(refused_count=2, calls=10, failures={"HTTPStatusError 429": 2, "OSError": 1})
    assert workers_in_all([row, WorkerRow(BILLING, 2, other, 1.0)]) == {
        "worker_count": 2,
        "unconfirmed_count": 7,
        "refused_count": 2,
        "failing_shards_count": 0,
        "failing_count": 0,
        "calls": 30,
        "failures": {"HTTPStatusError 429": 9, "OSError": 1},
        "oldest_call_s": 45.0,
    }
    assert workers_in_all([])["oldest_call_s"] is None


def test_a_report_of_another_version_is_read_as_far_as_it_goes():
    assert _report('{"version": "9", "unheard_of": 1}') == WorkerReport(version="9")
    assert _report('{"version": 9}') == _report("") == WorkerReport()
    assert _report(msgspec.json.encode(HANGS).decode()) == HANGS


def test_a_consumer_stalls_when_all_its_processes_do():
    """One of two without partitions is a spare. Indexers do the work of each index."""
    spare, away = WorkerReport(stall=Stall.NO_PARTITIONS), WorkerReport(stall=Stall.NO_KAFKA, stall_reason="no broker")
    rows = [WorkerRow(BILLING, 1, WorkerReport(), 1.0), WorkerRow(BILLING, 2, spare, 1.0)]
    assert stall_of(rows, BILLING) is None
    assert stall_of([WorkerRow(BILLING, 1, away, 1.0), rows[1]], BILLING) == (Stall.NO_KAFKA, "no broker")
    assert stall_of([WorkerRow(INDEXER, 3, away, 1.0)], "index:by_title") == (Stall.NO_KAFKA, "no broker")
    assert stall_of([], BILLING) is None


def test_a_topic_whose_partitions_were_raised_is_named_while_tailing_runs():
    """All is published. Whoever publishes nothing comes first."""
    raised, away = WorkerReport(stall=Stall.PARTITION_COUNT, stall_reason="16"), WorkerReport(stall=Stall.NO_KAFKA)
    assert tailing_of([WorkerRow(TAILER, 1, WorkerReport(), 1.0)]) == ("running", None)
    assert tailing_of([WorkerRow(BILLING, 1, WorkerReport(), 1.0)])[0] == Stall.NO_PARTITIONS
    assert tailing_stall([], 6).startswith("no_partitions: no tailer")
    assert tailing_of([WorkerRow(TAILER, 1, raised, 1.0)]) == ("running", "16")
    assert tailing_of([WorkerRow(TAILER, 1, away, 1.0)])[0] == Stall.NO_KAFKA


def test_a_shard_waits_for_what_holds_it_and_not_for_what_holds_another_one():
    held = WorkerReport(failing_shards=(WaitingShard(TAILER, 5, "bound: too large"),), failing_shards_count=1)
    rows = [WorkerRow(TAILER, 1, held, 1.0)]
    assert (tailing_stall(rows, 5), tailing_stall(rows, 6)) == ("bound: too large", None)
    away = WorkerReport(stall=Stall.NO_KAFKA, stall_reason="no broker")
    assert tailing_stall([WorkerRow(TAILER, 1, away, 1.0)], 6) == "no_kafka: no broker"
