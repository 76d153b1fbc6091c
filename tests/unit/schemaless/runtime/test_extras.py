"""The extras of the wheel: what is loaded without them, and how a missing one is named."""

import ast
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import schemaless
from schemaless.errors import MissingExtra, SchemalessError
from schemaless.runtime import extras
from schemaless.runtime.extras import Extra, needs, require

HEAVY = {"aiokafka", "asyncmy", "confluent_kafka", "faust", "httpx", "mode", "pymysql", "stamina", "uvloop"}


@pytest.mark.parametrize("module", ["schemaless", "schemaless.__main__", "schemaless.client.client"])
def test_what_needs_no_extra_loads_none(module):
    """The client and the command line start without Kafka, Faust and MySQL drivers, also where these are installed."""
    code = f"import sys, {module}; print(' '.join(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert not HEAVY & set(loaded.stdout.split())


def test_a_missing_extra_is_named_with_the_command_that_installs_it(monkeypatch):
    """One line, without a hint in brackets behind it; a missing import to Python."""
    monkeypatch.setattr(Extra, "is_installed", lambda extra: False)
    with pytest.raises(MissingExtra) as raised:
        needs("tail", Extra.KAFKA)(lambda: None)()
    assert str(raised.value) == "`schemaless tail` needs Kafka: pip install 'schemaless-store[kafka]'"
    assert raised.value.hint == ""
    with pytest.raises(ImportError, match=r"needs Kafka and MySQL: pip install 'schemaless-store\[kafka,mysql\]'"):
        require("`schemaless audit`", Extra.KAFKA, Extra.MYSQL)
    with pytest.raises(ImportError, match=r"schemaless.Subscriber needs Kafka"):
        _ = schemaless.Subscriber


def test_the_kit_names_the_extra_that_has_all_it_imports(monkeypatch):
    """With the extra mysql alone it ended in `No module named 'httpx'`."""
    monkeypatch.delitem(sys.modules, "httpx", raising=False)
    monkeypatch.setattr(extras, "find_spec", lambda package: None if package == "httpx" else package)
    kit = Path(schemaless.__file__).parent / "testing" / "__init__.py"
    with pytest.raises(MissingExtra, match=r"schemaless.testing needs .*\[triggers\]"):
        runpy.run_path(str(kit))


def test_public_names_are_the_ones_that_type_checkers_see():
    """What is imported for type checkers is what is loaded later, and every public name can be had."""
    tree = ast.parse(Path(schemaless.__file__).read_text())
    seen = {
        alias.asname
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("schemaless.")
        for alias in node.names
    }
    assert sorted(name for name in seen if name and not name.startswith("_")) == schemaless.__all__
    assert all(getattr(schemaless, name) for name in schemaless.__all__)
    assert issubclass(schemaless.Conflict, SchemalessError)
