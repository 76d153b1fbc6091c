"""Types for users: mypy --strict accepts a program with every form, and finds what @trigger would refuse."""

from pathlib import Path

from mypy import api

ROOT = Path(__file__).parents[2]
WRONG = ["retry=5", "park='shard'", "max_age='1h'", "name=7", "where=7", "retry=RetryPolicy(attempts='5')", "colum='A'"]


def test_mypy_accepts_every_form_and_finds_wrong_arguments(tmp_path):
    """One run over both programs: the cache of `make check` makes it quick."""
    wrong = tmp_path / "wrong.py"
    lines = [f"trigger(column='BASE', {argument})" for argument in WRONG]
    wrong.write_text("\n".join(["from schemaless import RetryPolicy, trigger", *lines]))
    cache = ["--cache-dir", str(ROOT / ".mypy_cache"), "--config-file", str(ROOT / "pyproject.toml")]
    out, errors, _ = api.run(["--strict", *cache, str(ROOT / "tests" / "typed_program.py"), str(wrong)])
    found = [line for line in out.splitlines() if ": error: " in line]
    assert not errors
    assert [line for line in found if "typed_program" in line] == []
    assert {int(line.split(":")[1]) for line in found} == set(range(2, 2 + len(WRONG)))
