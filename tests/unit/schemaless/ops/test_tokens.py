"""What becomes of a token that can't be stored everywhere. No server."""

from types import SimpleNamespace

import pytest

from schemaless.errors import StorageUnavailable
from schemaless.ops import tokens


async def test_a_token_that_reached_no_cluster_after_it_was_added_is_revoked(monkeypatch):
    """Nobody has its secret, and its name would be taken."""
    written = []

    async def known(storage):
        return SimpleNamespace(at_least_one=list, failures={})

    async def added(storage, token):
        return True

    async def write(storage, found):
        written.extend(found)
        if len(written) == 1:
            raise StorageUnavailable("all are away")
        return ()

    for name, stub in {"read_tokens": known, "_add": added, "_write": write}.items():
        monkeypatch.setattr(tokens, name, stub)
    with pytest.raises(StorageUnavailable, match="all are away"):
        await tokens.create_token(None, "night", ["mezzanine"], "read", "1d")
    first, revoked = written
    assert not first.revoked_at
    assert revoked.revoked_at
    assert revoked.name == "night"
