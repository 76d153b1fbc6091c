"""The log of admin actions: none is left out, however many there are (I17)."""

import structlog

from schemaless.ops.tokens import record_action
from schemaless.runtime.logs import LogLimit, RepeatLimiter
from schemaless.storage.admin_action_table import AdminAction
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.topology import parse_topology

ACTIONS = [AdminAction(0, "eve", f"POST /v1/trips/indexes/i{n}/pause", "10.0.0.1", "200") for n in range(20)]


async def test_no_admin_action_is_left_out_of_the_log():
    """A script does many in a minute. Where no master takes them, a warning has the whole action, at any log level."""
    written = []

    def keep(_logger, level, line):
        written.append((level, line))
        raise structlog.DropEvent

    before = structlog.get_config()
    structlog.configure(processors=[LogLimit(RepeatLimiter()), keep])
    try:
        async with AsyncStorage(parse_topology({"version": 2, "clusters": {}})) as storage:
            for action in ACTIONS:
                assert not await record_action(storage, action)
    finally:
        structlog.configure(**before)
    for level in ("info", "warning"):
        found = [(line["who"], line["what"], line["peer"], line["outcome"]) for each, line in written if each == level]
        assert found == [(action.who, action.what, action.peer, action.outcome) for action in ACTIONS]
