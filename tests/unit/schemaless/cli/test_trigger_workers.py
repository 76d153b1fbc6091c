"""`triggers run`: workers that die are started again, and with --watch all of them when a source file changes."""

import os

import pytest

from schemaless.cli.triggers import SourceFiles, TriggerWorkers
from schemaless.errors import Misconfigured


class Process:
    """A process that ends when it is told to, or when the test says so."""

    def __init__(self):
        self.status = None

    def poll(self):
        return self.status

    def terminate(self):
        self.status = 0

    def wait(self, timeout=None):
        return self.status


class Command:
    """The workers of one command, with a clock of the test's."""

    def __init__(self, count=1, sources=None):
        self.started = []
        self.now = 0.0
        self.workers = TriggerWorkers(self.start, count, sources, lambda: self.now)

    def start(self):
        self.started.append(Process())
        return self.started[-1]

    def step(self, after_s=0.0):
        self.now += after_s
        return self.workers.step()


class Sources:
    """Source files that change when the test says so."""

    changed = False

    def have_changed(self):
        changed, self.changed = self.changed, False
        return changed


def test_a_worker_that_dies_is_started_again_after_a_second():
    """The others go on."""
    command = Command(count=2)
    command.step(6)
    command.started[0].status = -9
    assert command.step() is None
    assert len(command.started) == 2
    command.step(1)
    assert len(command.started) == 3
    assert command.started[1].status is None


def test_a_worker_that_cannot_even_start_ends_the_command():
    """With its exit status."""
    command = Command()
    command.started[0].status = 3
    assert command.step(1) == 3


def test_a_change_of_the_sources_starts_all_workers_again():
    """After they have ended."""
    sources = Sources()
    command = Command(count=2, sources=sources)
    command.step(6)
    sources.changed = True
    command.step()
    assert [process.status for process in command.started] == [0, 0, None, None]


def test_a_module_that_fails_at_import_waits_for_the_next_change():
    """Its error was printed. To start it again would print it again."""
    sources = Sources()
    command = Command(sources=sources)
    command.started[0].status = 1
    assert command.step(1) is None
    command.step(60)
    assert len(command.started) == 1
    sources.changed = True
    command.step()
    assert len(command.started) == 2
    command.step(60)
    command.started[1].status = -9  # it had run well
    command.step()
    command.step(1)
    assert len(command.started) == 3


def test_source_files_are_the_module_and_those_below_its_folder(tmp_path, monkeypatch):
    """Written, made or deleted. Neither hidden folders nor environments count."""
    package = tmp_path / "programs"
    for folder in (package / "rates", package / ".cache", package / "env"):
        folder.mkdir(parents=True)
    (package / "billing.py").write_text("1")
    (package / "env" / "pyvenv.cfg").touch()
    monkeypatch.chdir(tmp_path)
    sources = SourceFiles("programs.billing")
    assert not sources.have_changed()
    (package / "rates" / "table.py").touch()
    assert sources.have_changed()
    assert not sources.have_changed()
    os.utime(package / "billing.py", (1, 1))
    assert sources.have_changed()
    for folder in (".cache", "env"):
        (package / folder / "other.py").touch()
    (package / "notes.txt").touch()
    assert not sources.have_changed()
    (package / "rates" / "table.py").unlink()
    assert sources.have_changed()
    assert not SourceFiles("programs/billing.py").have_changed()


def test_a_module_without_a_file_cannot_be_watched():
    """It says so before anything is started."""
    with pytest.raises(Misconfigured, match="no file"):
        SourceFiles("no.such.module")
