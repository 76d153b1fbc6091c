"""A trigger program: the trigger functions of one module, its name, and where it comes from."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from schemaless.errors import InvalidRequest, Misconfigured
from schemaless.names import trigger_consumer
from schemaless.storage.trigger_order_table import ORIGIN_CHARACTERS_MAX, ProgramFunctions
from schemaless.triggers.decorator import Trigger, triggers_of

UNVERSIONED = "unversioned"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
_VERSION = re.compile(r"[!-~]{1,64}")


@dataclass(frozen=True, slots=True)
class TriggerProgram:
    """`triggers` by column. Those of one column are in the order of the module. `version` is that of its code.

    `origin` tells it from other programs of the same name: a dotted module, or the path of a file outside any package.
    """

    name: str
    triggers: Mapping[str, Sequence[Trigger]]
    version: str = UNVERSIONED
    origin: str = ""

    @property
    def consumer(self) -> str:
        """The name of its checkpoints."""
        return trigger_consumer(self.name)

    @property
    def functions(self) -> ProgramFunctions:
        """Returns what is stored of it for those who run no code of it."""
        names = {column: [marked.name for marked in found] for column, found in self.triggers.items()}
        return ProgramFunctions(names, self.version, origin=self.origin)

    def parallel(self, default: int) -> dict[str, int]:
        """Returns by function how many calls are made at once in a shard. `default`: of functions that don't say.

        A function that is marked for several columns has the largest number.
        """
        most: dict[str, int] = {}
        for marked in (marked for found in self.triggers.values() for marked in found):
            own = default if marked.parallel is None else marked.parallel
            most[marked.name] = max(own, most.get(marked.name, 0))
        return most


def load_program(module: str, name: str | None = None) -> TriggerProgram:
    """Loads a dotted module, or a .py file. `name` is by default the last part of the module's name.

    Raises Misconfigured when it is missing, marks no function or two of one name, or marks one wrongly.
    """
    is_file = module.endswith(".py")
    if name is None:
        name = Path(module).stem if is_file else module.rpartition(".")[2]
    require_program_name(name)
    try:
        loaded = _load_file(Path(module)) if is_file else _import(module)
    except InvalidRequest as wrong:  # a column or a condition of @trigger. Nobody has sent a request
        raise Misconfigured(f"{module} can't be imported: {wrong}", hint="correct it in the program") from wrong
    return program_of(name, vars(loaded), _version(loaded), _origin(loaded, None if is_file else module))


def require_program_name(name: str) -> None:
    """Raises Misconfigured."""
    if not _NAME.fullmatch(name):
        raise Misconfigured(
            f"{name!r} can't be the name of a program: give one of letters, digits and _ after a letter"
        )


def program_of(name: str, namespace: Mapping[str, Any], version: str = UNVERSIONED, origin: str = "") -> TriggerProgram:
    """Returns the program of the marked functions among some values.

    Raises Misconfigured when none is marked, or two have one name.
    """
    by_column: dict[str, list[Trigger]] = {}
    by_name: dict[str, list[Trigger]] = {}
    for found in triggers_of(namespace):
        for other in by_name.setdefault(found.name, []):  # one function may be marked for several columns
            if found.function is not other.function or found.column == other.column:
                raise Misconfigured(f"two trigger functions have the name {found.name}: give one of them name=")
        by_name[found.name].append(found)
        by_column.setdefault(found.column, []).append(found)
    if not by_column:
        raise Misconfigured(f"{name} has no function that is marked with @trigger")
    return TriggerProgram(name, by_column, version, origin)


def _version(module: ModuleType) -> str:
    """Returns the module's `__version__`, or else a digest of its source file."""
    given = vars(module).get("__version__")
    if given is not None:
        if not isinstance(given, str) or not _VERSION.fullmatch(given):
            raise Misconfigured(f"__version__ of {module.__name__} must be 1 to 64 visible characters, not {given!r}")
        return given
    file = getattr(module, "__file__", None)
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12] if file else UNVERSIONED


def _origin(module: ModuleType, dotted: str | None) -> str:
    """Returns the dotted name of a module in a package, else the path of its file, in at most 500 characters."""
    if dotted is not None and "." in dotted:
        return dotted[-ORIGIN_CHARACTERS_MAX:]
    file = getattr(module, "__file__", None)
    if file is None:
        return module.__name__[-ORIGIN_CHARACTERS_MAX:]
    path = Path(file).resolve()
    parts, folder = [path.stem], path.parent
    while (folder / "__init__.py").is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    return (".".join(parts) if parts[1:] else str(path))[-ORIGIN_CHARACTERS_MAX:]


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
