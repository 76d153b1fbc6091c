"""A client waits until an index is active, and its change answers or waits for the switch."""

import httpx
import pytest

from schemaless import AsyncClient
from schemaless.client import answers
from schemaless.errors import NotFound, NotReady, StateConflict

HOST = ["http://one"]
GONE = {"status": 404, "detail": "index by_owner of m was dropped", "hint": "make it anew", "retryable": False}


def version(state, role="answers", switch="automatic", reason=None):
    number = 2 if role == "change" else 1
    shown = {"number": number, "role": role, "state": state, "switch": switch, "reason": reason}
    return shown | {"what_to_do": "bring it back"}


def document(state, *others):
    own = version(state)
    shown = {each: own[each] for each in ("number", "state", "reason", "what_to_do")}
    return {"name": "by_owner", **shown, "versions": [own, *others]}


@pytest.fixture
def wait(monkeypatch):
    """Waits while the API answers with these documents, the last one for ever. Returns how many it asked for."""
    monkeypatch.setattr(answers, "INDEX_POLL_S", 0.0)

    async def run(*documents, timeout_s=60.0):
        left, asked = list(documents), []

        def handler(_request):
            asked.append(left.pop(0) if len(left) > 1 else left[0])
            return httpx.Response(404, json=GONE) if asked[-1] is None else httpx.Response(200, json=asked[-1])

        transport = httpx.MockTransport(handler)
        async with AsyncClient(HOST, datastore="m", transport=transport) as client:
            found = await client.index("by_owner").wait(timeout_s)
        assert found == asked[-1]
        return len(asked)

    return run


async def test_it_waits_for_the_build_and_for_the_change(wait):
    assert await wait(document("building"), document("building"), document("active")) == 3
    built = version("active", "change")  # it is switched in a moment
    assert (
        await wait(document("active", version("building", "change")), document("active", built), document("active"))
        == 3
    )
    held = version("active", "change", "manual")
    assert await wait(document("active", version("building", "change", "manual")), document("active", held)) == 2


@pytest.mark.parametrize("state", ["paused", "failed", "deleting"])
async def test_what_does_not_come_by_itself_is_not_waited_for(wait, state):
    with pytest.raises(StateConflict, match=f"version 1 of the index is {state}"):
        await wait(document("building"), document(state))
    with pytest.raises(StateConflict, match=f"version 2 of the index is {state}: its table is lost") as raised:
        await wait(document("active", version(state, "change", reason="its table is lost")))
    assert raised.value.hint == "bring it back"


async def test_an_index_that_is_dropped_is_not_waited_for(wait):
    """Whether somebody drops it meanwhile, or did before."""
    with pytest.raises(StateConflict, match="by_owner was dropped meanwhile") as raised:
        await wait(document("building"), None)
    assert raised.value.hint == "make it anew"
    with pytest.raises(NotFound, match="was dropped"):
        await wait(None)


async def test_it_gives_up_in_time(wait):
    with pytest.raises(NotReady) as raised:
        await wait(document("building"), timeout_s=-1.0)
    assert raised.value.hint == "bring it back"
