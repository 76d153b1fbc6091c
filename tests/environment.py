"""The environment of a process under test, from the Python names of its settings."""

from collections.abc import Mapping

from schemaless.config import ClientSettings, Settings, variable_of


def environment_of(kind: type[Settings], settings: Mapping[str, object]) -> dict[str, str]:
    """Returns variables by name. Fails for a setting that neither `kind` nor a client has."""
    unknown = settings.keys() - kind.model_fields.keys() - ClientSettings.model_fields.keys()
    assert not unknown, f"{kind.__name__} has no {unknown}"
    return {
        variable_of(kind if name in kind.model_fields else ClientSettings, name): str(value)
        for name, value in settings.items()
    }
