"""What `triggers status` says of a worker."""

import pytest
from typer.testing import CliRunner

from schemaless import Client
from schemaless.__main__ import app
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


PROGRAM = {
    "program": "billing", "state": "running", "reason": None, "lag": 0, "lag_seconds": 0.0, "worker_count": 1,
    "oldest_call_s": None, "stopped": [], "rate": 0.0, "counts": {}, "parked": 0, "workers": [], "failures": {},
    **dict.fromkeys(("unconfirmed_count", "refused_count", "failing_shards_count", "failing_count"), 0),
}  # fmt: skip


@pytest.mark.parametrize("unknown", [{}, {"a": "no answer within 2 s"}])
@pytest.mark.parametrize("away", [{}, {"b": "b1: connection refused"}])
@pytest.mark.parametrize("command", ["list", "status"])
def test_a_cluster_that_does_not_answer_is_named_once_and_its_lag_is_not_zero(monkeypatch, unknown, away, command):
    """32 of 64 shards may be behind, and the others say 0. Where only minions answer, the cause is said once, too."""
    document = {"triggers": [PROGRAM]} if command == "list" else PROGRAM
    document = {**document, "unknown": unknown, "masters_away": away}
    monkeypatch.setattr(Client, "document", lambda *_: document)
    arguments = ["triggers", command, *(["billing"] if command == "status" else []), "--hosts", "http://one"]
    done = CliRunner().invoke(app, arguments)
    assert ("at least 0" in done.stdout) == bool(unknown)
    assert done.stderr.count("nothing is known of its shards (no answer within 2 s)") == len(unknown)
    assert done.stderr.count("cluster b: its master is away") == len(away)


def test_the_list_shows_parked_cells(monkeypatch):
    """After its last attempt a cell doesn't fail any more, and its program is behind by nothing."""
    document = {"triggers": [PROGRAM | {"parked": 4711}], "unknown": {}, "masters_away": {}}
    monkeypatch.setattr(Client, "document", lambda *_: document)
    done = CliRunner().invoke(app, ["triggers", "list", "--hosts", "http://one"])
    assert "parked cells" in done.stdout
    assert "4711" in done.stdout


def test_a_status_says_for_what_share_of_calls_fail(monkeypatch):
    """Also while others succeed: nothing else names a limit that a service has."""
    more = {"unknown": {}, "masters_away": {}, "calls": 200, "failures": {"HTTPStatusError 429": 120, "OSError": 6}}
    monkeypatch.setattr(Client, "document", lambda *_: PROGRAM | more)
    done = CliRunner().invoke(app, ["triggers", "status", "billing", "--hosts", "http://one"])
    assert "63% of 200 calls in ten seconds failed: HTTPStatusError 429 (120), OSError (6)\n" in done.stdout


def test_cells_that_fail_alike_are_one_line(capsys):
    """In an outage all fail alike, and their tracebacks would fill the screen."""
    error = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\nValueError: {}\nask x'
    cells = [
        {"trigger": "bill", "cell": f"r/BASE/{n}", "location": f"0:1:{n}", "attempt": attempt, "attempts": 5,
         "again_at": "2026-01-01T00:00:00Z", "error": error.format(why)}
        for n, attempt, why in ((1, 2, "no"), (2, 1, "no"), (3, 0, "later"))
    ]  # fmt: skip
    print_worker(WORKER | {"failing": cells, "failing_count": 13})
    told = capsys.readouterr().out.splitlines()[2:]
    assert told == [
        "bill on r/BASE/1 at 0:1:1 and 1 more cell alike fails: attempt 2 of 5, ValueError: no",
        "  it is called again at 2026-01-01T00:00:00Z",
        "bill on r/BASE/3 at 0:1:3 waits, ValueError: later",
        "  it is called again at 2026-01-01T00:00:00Z",
        "and 10 more cells that fail or wait",
    ]


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"was_paused": True, "stopped": 0, "paused": 0}, "resumed: the whole program\n"),
        ({"was_paused": True, "stopped": 2, "paused": 0}, "resumed: the whole program, 2 stopped shards\n"),
        ({"was_paused": False, "stopped": 0, "paused": 1}, "resumed: 0 stopped shards, 1 paused shard\n"),
    ],
)
def test_a_resume_says_what_runs_again(monkeypatch, document, said):
    """Also where the whole program was paused, and no shard by itself."""
    monkeypatch.setattr(Client, "call", lambda *_, **given: {**document, "unreached": []})
    done = CliRunner().invoke(app, ["triggers", "resume", "billing", "--hosts", "http://one"])
    assert done.stdout == said


def test_a_program_without_a_worker_is_said_to_have_none(monkeypatch):
    """Its state is still what people ordered."""
    document = {"triggers": [PROGRAM | {"worker_count": 0}], "unknown": {}, "masters_away": {}}
    monkeypatch.setattr(Client, "document", lambda *_: document)
    done = CliRunner().invoke(app, ["triggers", "list", "--hosts", "http://one"])
    assert "no worker" in done.stdout
