"""A plugin for pytest: the fixture `trigger_kit`. Load it with `pytest_plugins = ["schemaless.pytest_plugin"]`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from schemaless.testing import TriggerKit

MakeTriggerKit = Callable[..., "TriggerKit"]
"""What the fixture is: it takes the arguments of TriggerKit."""


@pytest.fixture
def trigger_kit() -> Iterator[MakeTriggerKit]:
    """Makes TriggerKits, and closes them when the test ends."""
    from schemaless.testing import TriggerKit

    with ExitStack() as kits:

        def make(*program: object, **options: object) -> TriggerKit:
            return kits.enter_context(TriggerKit(*program, **options))  # type: ignore[arg-type]

        yield make
