"""What .ci/run does with a test that failed, on a small project with a Makefile and a pytest of its own."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAKEFILE = """
check:
\t@echo checked
test:
\t.venv/bin/pytest -q
test-mysql:
\tSCHEMALESS_MYSQL_FLAVOUR=mysql .venv/bin/pytest -q -m storage
"""
SETTINGS = "[pytest]\nmarkers = storage: depends on the kind of server\n"
FAILS_ONCE = """
import os, pathlib, pytest

def fails(times):
    seen = pathlib.Path(f"{os.environ['PYTEST_CURRENT_TEST'].split(' ')[0].replace('/', '_')}.seen")
    seen.write_text(seen.read_text() + "x" if seen.exists() else "x")
    assert len(seen.read_text()) > times
"""


def gate(folder: Path, tests: str, makefile: str = MAKEFILE) -> tuple[int, str]:
    """The exit status of .ci/run and what it printed to its output."""
    (folder / ".venv" / "bin").mkdir(parents=True)
    pytest_ = folder / ".venv" / "bin" / "pytest"
    pytest_.write_text(f'#!/bin/sh\nPYTEST_DISABLE_PLUGIN_AUTOLOAD=1 exec {sys.executable} -m pytest "$@"\n')
    pytest_.chmod(0o755)
    (folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", folder / ".ci" / "run")
    (folder / "Makefile").write_text(makefile)
    (folder / "pytest.ini").write_text(SETTINGS)
    (folder / "test_it.py").write_text(FAILS_ONCE + tests)
    ran = subprocess.run(["bash", ".ci/run"], cwd=folder, stdout=subprocess.PIPE, text=True, check=False)
    return ran.returncode, ran.stdout


def last_lines(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith(("unsteady: ", "wrong: "))]


def test_a_test_that_passes_alone_is_unsteady_and_the_gate_goes_on(tmp_path: Path):
    tests = """
@pytest.mark.parametrize("way", ["[one way]", "another"])
def test_a(way):
    fails(1 if way == "[one way]" else 0)

@pytest.mark.storage
def test_on_this_kind_of_server():
    fails(2 if os.environ.get("SCHEMALESS_MYSQL_FLAVOUR") == "mysql" else 0)
"""
    status, output = gate(tmp_path, tests)
    assert last_lines(output) == [
        "unsteady: test_it.py::test_a[[one way]]",
        "unsteady: test_it.py::test_on_this_kind_of_server",
    ]
    assert output.endswith("unsteady: test_it.py::test_on_this_kind_of_server\n")
    assert status == 0


def test_a_test_that_fails_twice_is_wrong_and_hides_no_later_stage(tmp_path: Path):
    tests = """
def test_a():
    fails(2)

@pytest.mark.storage
def test_b():
    assert "SCHEMALESS_MYSQL_FLAVOUR" not in os.environ
"""
    status, output = gate(tmp_path, tests)
    assert last_lines(output) == ["wrong: test_it.py::test_a", "wrong: test_it.py::test_b"]
    assert status == 1


def test_of_six_failed_tests_none_is_tried_again(tmp_path: Path):
    tests = """
@pytest.mark.parametrize("number", range(6))
def test_a(number):
    fails(1)
"""
    status, output = gate(tmp_path, tests + "\n@pytest.mark.storage\ndef test_b(): pass\n")
    assert last_lines(output) == ["wrong: make test: 6 tests, which are too many to try again"]
    assert status == 1


@pytest.mark.parametrize("end", ["raise KeyboardInterrupt", "os._exit(1)", "pytest.exit('enough', 3)"])
def test_an_end_that_is_no_failed_test_is_wrong(tmp_path: Path, end: str):
    tests = f"""
def test_a():
    fails(1)

def test_b():
    {end}

@pytest.mark.storage
def test_c(): pass
"""
    status, output = gate(tmp_path, tests)
    assert "wrong: make test, which ended in another way than by failed tests" in last_lines(output)
    assert status == 1


def test_a_file_that_cannot_be_collected_is_wrong(tmp_path: Path):
    status, output = gate(tmp_path, "import no_such_module\n")
    assert status == 1
    assert last_lines(output)[0].startswith("wrong: ")


def test_a_failed_check_ends_the_gate(tmp_path: Path):
    status, output = gate(tmp_path, "def test_a(): pass\n", MAKEFILE.replace("@echo checked", "@false"))
    assert status != 0
    assert "== make test" not in output


def test_what_a_failed_stage_kept_is_gone_before_the_next_and_in_the_end(tmp_path: Path):
    tests = """
@pytest.mark.storage
def test_a(tmp_path):
    (tmp_path / "data").touch()
    room = pathlib.Path(os.environ["PYTEST_DEBUG_TEMPROOT"])
    with open("kept", "a") as file:
        print(room, len(list(room.rglob("data"))), file=file)
    fails(1)
"""
    status, output = gate(tmp_path, tests)
    assert (status, last_lines(output)) == (0, ["unsteady: test_it.py::test_a"])
    kept = [line.split() for line in (tmp_path / "kept").read_text().splitlines()]
    assert [folders for _, folders in kept] == ["1", "2", "1"]
    assert not Path(kept[0][0]).exists()
