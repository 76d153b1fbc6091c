"""How long a server that a controller asks has said nothing, by a clock of the test."""

from types import SimpleNamespace

import pytest

from controller import service
from controller.service import Watched
from schemaless.errors import AccountRefused, StorageUnavailable
from schemaless.topology import Node

REFUSED = AccountRefused("a1 refuses the account 'admin': no", "a1 refuses the account 'admin'")
AWAY = StorageUnavailable("a1: connection refused")


@pytest.fixture
def asked(monkeypatch):
    """Asks a server once a second, with an error for each time, and returns how long it was silent each time."""
    now, errors = [0.0], []

    def connect(node):
        raise errors.pop(0)

    monkeypatch.setattr(service, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(service, "Server", connect)
    monkeypatch.setattr(Watched, "_keep_looking", lambda self: None)
    watched = Watched(Node("a1", "a", "127.0.0.1", 3306, "admin", "secret"))

    def ask(*given):
        silent = []
        for error in given:
            errors.append(error)
            now[0] += 1
            watched.look()
            silent.append(watched.silent_s)
        return silent, watched.refusal

    return ask


def test_a_server_is_silent_since_it_first_gave_no_answer(asked):
    """One failure isn't believed."""
    assert asked(AWAY, AWAY, AWAY) == ([0.0, 1.0, 2.0], "")


def test_time_in_which_it_refused_us_is_no_silence(asked):
    """It ran until then. Else whoever restarts it after ten minutes of refusals would find another master."""
    assert asked(REFUSED, REFUSED, REFUSED) == ([0.0, 1.0, 2.0], str(REFUSED))
    assert asked(AWAY, AWAY) == ([0.0, 1.0], "")
    assert asked(REFUSED, AWAY) == ([2.0, 0.0], "")
