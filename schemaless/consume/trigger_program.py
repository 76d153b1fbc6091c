"""A trigger program: the trigger functions of one module, named after the last part of the module's name."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from schemaless.errors import Misconfigured
from schemaless.names import trigger_consumer
from schemaless.trigger import Trigger, triggers_of

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")


@dataclass(frozen=True, slots=True)
class TriggerProgram:
    """`triggers` by column. Those of one column are in the order of the module."""

    name: str
    triggers: Mapping[str, Sequence[Trigger]]

    @property
    def consumer(self) -> str:
        """The name of its checkpoints."""
        return trigger_consumer(self.name)


def load_program(module: str) -> TriggerProgram:
    """Loads a dotted module, or a .py file. Raises Misconfigured when it is missing or marks no function."""
    is_file = module.endswith(".py")
    loaded = _load_file(Path(module)) if is_file else _import(module)
    name = Path(module).stem if is_file else module.rpartition(".")[2]
    if not _NAME.fullmatch(name):
        raise Misconfigured(f"{name!r} can't be the name of a program: rename the module")
    by_column: dict[str, list[Trigger]] = {}
    for found in triggers_of(vars(loaded)):
        by_column.setdefault(found.column, []).append(found)
    if not by_column:
        raise Misconfigured(f"{module} has no function that is marked with @trigger")
    return TriggerProgram(name, by_column)


def _import(module: str) -> ModuleType:
    if "" not in sys.path:
        sys.path.insert(0, "")  # modules are found from the folder where the command is run
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise Misconfigured(f"trigger program {module} can't be imported: {error}") from error


def _load_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise Misconfigured(f"there is no trigger program {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
