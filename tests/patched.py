"""`python -m tests.patched CONSTANT=VALUE … -- MODULE ARGUMENT …`: a process in which constants have other values.

A constant is named with its module, and with its class if it is an attribute. The modules that use it are imported
afterwards, so they see its new value under a name of their own, too.
"""

import ast
import pkgutil
import runpy
import sys
from collections.abc import Mapping, Sequence


def patched(module: Sequence[str], constants: Mapping[str, object]) -> list[str]:
    """The arguments of `python` that run a module with these constants, and as it is without any."""
    values = [f"{name}={value!r}" for name, value in constants.items()]
    return ["-m", *(["tests.patched", *values, "--"] if values else []), *module]


def main() -> None:
    cut = sys.argv.index("--")
    for assignment in sys.argv[1:cut]:
        name, _, value = assignment.partition("=")
        owner, _, constant = name.rpartition(".")
        holder = pkgutil.resolve_name(owner)
        assert hasattr(holder, constant), f"there is no {name}"
        setattr(holder, constant, ast.literal_eval(value))
    sys.argv = sys.argv[cut + 1 :]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
