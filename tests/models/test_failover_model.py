"""The model of failover has no counterexample with all guards, and one for each guard that is taken out."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

MODEL = Path(__file__).with_name("failover.pml")
IN_CI = "CI" in os.environ

pytestmark = pytest.mark.skipif(
    shutil.which("spin") is None and not IN_CI, reason="spin isn't installed: `make spin` installs it"
)

ONE_CHANGE = "-DPROMOTE -DCELLS=1 -DCONTROLLERS=1"
NO_CRASH = "-DCRASHES=0 -DRESTARTS=0"
NO_ROW_GOES = f"-DNO_CLEANER -DLOST_BEFORE_CAUGHT_UP {NO_CRASH}"
WITHOUT_S8 = "-DNO_S8"  # so that L4 has to hold alone
SCENARIOS = {
    "lost": f"{ONE_CHANGE} -DRELAY -DCRASHES=2",
    "lost, by hand": f"{ONE_CHANGE} -DBY_HAND -DCRASHES=2 -DRESTARTS=0",
    "late controller": f"-DPROMOTE -DSWITCH -DONE_OF_EACH -DCELLS=1 {NO_CRASH}",
    "late controller, two cells": f"-DPROMOTE {NO_ROW_GOES}",
    "switch": f"-DSWITCH -DRELAY -DCONTROLLERS=1 {NO_CRASH}",
    "restore": "-DOPEN -DRELAY -DRESTORES=1 -DNO_CLEANER -DCONTROLLERS=1",
    "restore, minion away": "-DOPEN -DRELAY -DRESTORES=1 -DCRASHES=2 -DCELLS=1 -DCONTROLLERS=1",
    "one copy": f"-DPROMOTE -DOPEN -DONE_COPY -DCELLS=1 {NO_ROW_GOES}",
    "one copy, opened by hand": f"{ONE_CHANGE} -DONE_COPY -DHAND {NO_ROW_GOES}",
    "voter left out": f"-DREMOVE -DPROMOTE -DCELLS=1 -DLOST_BEFORE_CAUGHT_UP {NO_CRASH} {WITHOUT_S8}",
    "tailer": f"-DPROMOTE -DTAILER -DCONTROLLERS=1 {NO_ROW_GOES}",
}
LONG = {
    "late controller, promotions": f"-DPROMOTE -DCELLS=1 {NO_CRASH}",  # within the next one: L9 fails sooner
    "late controller, any changes": f"-DPROMOTE -DSWITCH -DCELLS=1 {NO_CRASH}",
    "crash and start": "-DPROMOTE -DOPEN -DCELLS=1",
    "voter left out, and a crash": f"-DREMOVE -DPROMOTE -DCELLS=1 -DLOST_BEFORE_CAUGHT_UP -DRESTARTS=0 {WITHOUT_S8}",
    "late controller, two cells, switch": f"-DPROMOTE -DSWITCH {NO_ROW_GOES}",
}
GUARDS = {
    "lost": ["L1", "L2", "L3", "R2", "S3"],
    "lost, by hand": ["S8"],
    "late controller": ["M6", "S6"],
    "late controller, promotions": ["L9"],
    "late controller, two cells": ["M3", "R1", "R8"],
    "switch": ["R3"],
    "restore": ["R4", "R7"],
    "restore, minion away": ["R6"],
    "one copy": ["M1", "M2", "M4", "M7", "M8"],
    "one copy, opened by hand": ["M5"],
    "voter left out": ["L4", "S5", "S9", "R9"],
    "tailer": ["K1"],
}


def counterexample(folder: Path, flags: list[str], *compiler: str) -> str:
    """Returns which assertion fails, '' where none does. Raises CalledProcessError where the model doesn't compile."""
    spin = ["spin", "-a", *flags, str(MODEL)]
    subprocess.run(spin, cwd=folder, check=True, capture_output=True, timeout=120)
    # -Og: -O0 runs twice as long, and -O1 compiles twice as long and runs no sooner.
    cc = ["cc", "-w", "-Og", "-DSAFETY", "-DMEMLIM=4000", *compiler, "-o", "pan", "pan.c"]
    subprocess.run(cc, cwd=folder, check=True, capture_output=True, timeout=120)
    # -E: a process that waits for ever isn't an error.
    found = subprocess.run(["./pan", "-E", "-m1000"], cwd=folder, check=True, capture_output=True, text=True).stdout
    assert "max search depth too small" not in found
    assert "reached -DMEMLIM bound" not in found
    assert "errors: " in found, found
    failed = [line for line in found.splitlines() if "assertion violated" in line]
    assert bool(failed) == ("errors: 0" not in found), found
    return failed[0] if failed else ""


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_with_all_guards_nothing_fails(scenario: str, tmp_path: Path) -> None:
    assert counterexample(tmp_path, SCENARIOS[scenario].split()) == ""


@pytest.mark.faults
@pytest.mark.skipif("SCHEMALESS_FAULTS_LONG" not in os.environ, reason="takes minutes: `make faults`")
@pytest.mark.parametrize("scenario", LONG)
def test_with_all_guards_nothing_fails_in_a_larger_world(scenario: str, tmp_path: Path) -> None:
    assert counterexample(tmp_path, LONG[scenario].split(), "-O2", "-DCOLLAPSE") == ""


@pytest.mark.parametrize(("scenario", "guard"), [(name, guard) for name in GUARDS for guard in GUARDS[name]])
def test_without_a_guard_something_fails(scenario: str, guard: str, tmp_path: Path) -> None:
    flags = [*(SCENARIOS | LONG)[scenario].split(), f"-DNO_{guard}"]
    assert counterexample(tmp_path, flags, "-DT_REVERSE")  # found sooner: most guards are late steps


def test_every_guard_of_the_model_is_taken_out_once() -> None:
    named = set(re.findall(r"NO_([A-Z][0-9])", MODEL.read_text()))
    assert named == {guard for guards in GUARDS.values() for guard in guards}
