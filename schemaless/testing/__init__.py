"""Testing: trigger programs run in memory, over a store and a log that keep what the real ones promise.

`TriggerKit` is for users' tests (docs/testing-triggers.md). schemaless/pytest_plugin.py has it as a fixture.
"""

from __future__ import annotations

from schemaless.runtime.extras import Extra, require

require("schemaless.testing", Extra.TRIGGERS)

from schemaless.testing.memory_program import MemoryEntityTable as MemoryEntityTable  # noqa: E402
from schemaless.testing.trigger_kit import SeenCall as SeenCall  # noqa: E402
from schemaless.testing.trigger_kit import SetAside as SetAside  # noqa: E402
from schemaless.testing.trigger_kit import TriggerKit as TriggerKit  # noqa: E402
