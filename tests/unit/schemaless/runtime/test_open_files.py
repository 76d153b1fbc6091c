"""A process that may open too few files says so before it serves, and otherwise leaves what servers and logs need."""

import pytest
import structlog

from schemaless.errors import Misconfigured
from schemaless.runtime import open_files
from schemaless.runtime.open_files import clients_within_limit


@pytest.fixture
def limited(monkeypatch):
    """limited(soft, hard) -> the limits that are set from then on."""

    def limit(*limits):
        did = []
        monkeypatch.setattr(open_files.resource, "getrlimit", lambda which: limits)
        monkeypatch.setattr(open_files.resource, "setrlimit", lambda which, wanted: did.append(wanted))
        return did

    return limit


@pytest.mark.parametrize(
    ("limits", "raised", "clients"),
    [((1024, 4096), (4096, 4096), 3932), ((4096, 4096), None, 3932), ((1 << 20, 1 << 20), None, 19_836)],
)
def test_clients_leave_files_for_servers_and_logs(limited, limits, raised, clients):
    """A process that can open no file serves nobody."""
    did = limited(*limits)
    assert clients_within_limit(64) == clients
    assert did == ([raised] if raised else [])


def test_too_few_files_are_refused_in_a_sentence(limited):
    """B15: it names the limit, what is needed and how to raise it. The limit is raised first where that is allowed."""
    limited(64, 200)
    with pytest.raises(Misconfigured, match=r"may open 200 files and needs 212: 96 .* 16 .* 100 .*ulimit -n"):
        clients_within_limit(96, clients_min=16)
    assert clients_within_limit(96) == 4


def test_few_clients_are_warned_of(limited):
    """The process serves them, and its log says why there are no more."""
    limited(256, 256)
    with structlog.testing.capture_logs() as lines:
        assert clients_within_limit(96, clients_min=16) == 60
    assert [(line["log_level"], line["clients"], line["files"]) for line in lines] == [("warning", 60, 256)]
