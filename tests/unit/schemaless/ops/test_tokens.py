"""What becomes of a token that can't be stored everywhere. No server."""

from types import SimpleNamespace

import pytest

from schemaless.errors import AccountRefused, StorageUnavailable
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


REFUSED = AccountRefused("b1 refuses the account 'u': Access denied", "b1 refuses the account 'u'")


@pytest.mark.parametrize("reads", [True, False])
async def test_the_first_token_names_who_refuses_the_account(monkeypatch, reads):
    """Whether it is found when tokens are read, or a minion read them and the master takes none."""

    async def known(storage):
        return SimpleNamespace(at_least_one=list, failures={} if reads else {"b": REFUSED})

    async def added(storage, token):
        return True

    async def write(storage, found):
        return ("b",)

    for name, stub in {"read_tokens": known, "_add": added, "_write": write}.items():
        monkeypatch.setattr(tokens, name, stub)
    storage = SimpleNamespace(master=lambda cluster: SimpleNamespace(refused=REFUSED))
    with pytest.raises(AccountRefused, match="the first token needs every cluster") as raised:
        await tokens.create_token(storage, "night", ["mezzanine"], "read", "1d")
    assert raised.value.shown == REFUSED.shown


async def test_a_token_s_name_that_nobody_can_check_names_who_refuses_the_account():
    """No master lets us in."""

    async def run(*args, **options):
        raise REFUSED

    with pytest.raises(AccountRefused, match="whether the token's name is free: b1 refuses"):
        await tokens._add(SimpleNamespace(masters=[SimpleNamespace(run=run)]), None)
