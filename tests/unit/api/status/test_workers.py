"""What the API says of workers, from the rows that servers have."""

import msgspec

from api.status.workers import present_workers, worker_view, workers_in_all
from schemaless.storage.worker_table import OldestCall, WaitingShard, WorkerReport, WorkerRow, _report

BILLING = "trigger:billing"
HANGS = WorkerReport(
    version="0.1.0",
    transport="plain",
    unconfirmed=(WaitingShard(BILLING, 3, "another process moved its checkpoint"),),
    unconfirmed_count=7,
    oldest_call=OldestCall("bill_rider", "a cell", 5, 40.0),
)


def test_the_newest_row_of_each_process_counts_and_old_ones_are_left_out():
    """A minion that lags has an older one. A process that wasn't seen for long has ended."""
    old, new = WorkerRow(BILLING, 1, WorkerReport(), 9.0), WorkerRow(BILLING, 1, HANGS, 1.0)
    dead = WorkerRow(BILLING, 2, HANGS, 31.0)
    assert present_workers([[old, dead], [new], []]) == [new]


def test_a_call_grows_older_after_it_was_reported():
    row = WorkerRow(BILLING, 1, HANGS, 5.0)
    assert worker_view(row)["oldest_call"] == {"trigger": "bill_rider", "cell": "a cell", "shard": 5, "age_s": 45.0}
    assert workers_in_all([row, WorkerRow(BILLING, 2, WorkerReport(refused_count=2), 1.0)]) == {
        "worker_count": 2,
        "unconfirmed_count": 7,
        "refused_count": 2,
        "failing_shards_count": 0,
        "failing_count": 0,
        "oldest_call_s": 45.0,
    }
    assert workers_in_all([])["oldest_call_s"] is None


def test_a_report_of_another_version_is_read_as_far_as_it_goes():
    assert _report('{"version": "9", "unheard_of": 1}') == WorkerReport(version="9")
    assert _report('{"version": 9}') == _report("") == WorkerReport()
    assert _report(msgspec.json.encode(HANGS).decode()) == HANGS
