"""The environment of a process under test, from the Python names of its settings."""

from collections.abc import Mapping

from schemaless.config import Settings, variable_of


def environment_of(kind: type[Settings], settings: Mapping[str, object]) -> dict[str, str]:
    """Returns variables by name. A name that `kind` doesn't have is a shared setting, such as `hosts`."""
    return {
        variable_of(kind, name) if name in kind.model_fields else f"SCHEMALESS_{name.upper()}": str(value)
        for name, value in settings.items()
    }
