"""Who is asking: what the page is told of a caller's token."""

import json
from types import SimpleNamespace

import pytest

from api.access.admission import Admission
from api.access.known_tokens import KnownTokens
from api.http.request import Request
from api.routes.ui import get_session
from schemaless.access import issue, now_us
from schemaless.config import ApiSettings

NAMES = ("orders", "trips", "users")


class Catalogue:
    async def all(self):
        return dict.fromkeys(NAMES)


def tokens_of(*grants):
    return [issue("ada", reach, scope, "1h", now_us())[1] for scope, *reach in grants]


async def session_of(tmp_path, tokens):
    """Tokens as an issuer would find them in a JWT, the widest first."""

    async def find(secret):
        return tokens

    settings = ApiSettings(topology=tmp_path, kafka="127.0.0.1:9")
    admission = Admission(settings, KnownTokens(None), SimpleNamespace(find=find))
    scope = {"method": "GET", "query_string": b"", "headers": [(b"authorization", b"Bearer a.b.c")]}
    state = SimpleNamespace(admission=admission, catalogue=Catalogue())
    token = tokens[0] if tokens else None
    return json.loads((await get_session(Request(state, scope, None, {}, token))).body)


@pytest.mark.parametrize(
    ("grants", "datastores", "everywhere"),
    [
        ([("read", "*")], dict.fromkeys(NAMES, "read"), False),
        ([("admin", "trips")], {"trips": "admin"}, False),
        ([("admin", "*")], dict.fromkeys(NAMES, "admin"), True),
        ([("admin", "trips"), ("read", "orders", "trips")], {"orders": "read", "trips": "admin"}, False),
        ([("write", "users"), ("read", "*")], {"orders": "read", "trips": "read", "users": "write"}, False),
        ([], dict.fromkeys(NAMES, "admin"), True),
    ],
    ids=["a reader", "an administrator of one", "an administrator", "two grants", "a wide and a narrow one", "nobody"],
)
async def test_a_session_has_the_widest_scope_in_each_datastore(tmp_path, grants, datastores, everywhere):
    """A JWT may grant several. Who needs no token may do everything."""
    session = await session_of(tmp_path, tokens_of(*grants))
    assert (session["datastores"], session["everywhere"]) == (datastores, everywhere)
    assert (session["expires_at"] is None) == (not grants)
