"""What `triggers status` says of a worker."""

import pytest

from schemaless.cli.triggers import print_worker

WORKER = {
    "host": "vm", "pid": 7, "partitions": 1, "assigned": [0], "rate": 0.0, "transport": "faust", "version": "0.1.0",
    "is_member": True, "parallel": {}, "oldest_call": None,
    **{key: [] for key in ("unconfirmed", "refused", "failing_shards", "failing")},
    **dict.fromkeys(("unconfirmed_count", "refused_count", "failing_shards_count", "failing_count"), 0),
}  # fmt: skip


@pytest.mark.parametrize("is_member", [True, False])
def test_a_worker_without_an_answer_of_its_group_says_why_it_calls_nothing(capsys, is_member):
    """Its program is said to run, and is behind. Only this line names Kafka."""
    print_worker(WORKER | {"is_member": is_member})
    assert ("calls nothing" in capsys.readouterr().out) is not is_member
