"""No step of a request is long: between its pieces, others have their turn (I14)."""

import asyncio

import msgspec
import pytest

from api.http import budget, content
from api.http.budget import STEP_BYTES_MAX, Held, ReadBudget
from api.http.content import JSON, MSGPACK, NDJSON, stored_body
from api.http.response import all_views, views_within
from api.routes import cells as cell_routes
from api.routes.cells import ITEMS_MAX, parse_gets, parse_puts
from schemaless.cell import Cell
from schemaless.codec import BODY_BYTES_MAX, decode_body
from schemaless.errors import Invalid, TooLarge

KEY = {"row_key": "6c9e5b1e-7f5a-4a8f-9c58-0d7b52d1f001", "column_name": "BASE", "ref_key": 1}


class Turns:
    """Stands for asyncio.sleep, and remembers how much was done when others had their turn."""

    def __init__(self):
        self.done = 0
        self.longest = 0

    def work(self, count):
        self.done += count
        self.longest = max(self.longest, self.done)

    async def sleep(self, delay):
        self.done = 0


@pytest.fixture
def turns(monkeypatch):
    turns = Turns()
    monkeypatch.setattr(budget.asyncio, "sleep", turns.sleep)
    return turns


@pytest.mark.parametrize("form", [JSON, NDJSON, MSGPACK])
async def test_a_batch_is_parsed_item_by_item(monkeypatch, turns, form):
    """At most STEP_BYTES_MAX and one body are decoded without a pause."""
    put_item = cell_routes._put_item
    monkeypatch.setattr(
        cell_routes, "_put_item", lambda raw, *rest: (turns.work(len(bytes(raw))), put_item(raw, *rest))[1]
    )
    cells = [{**KEY, "ref_key": n, "body": {"a": "x" * 50_000}} for n in range(100)]
    cells += [{**KEY, "ref_key": n, "body": {"a": "x" * 1_000_000}} for n in range(10)]
    payload = form.encode(cells if form is NDJSON else {"cells": cells})
    parsed = await parse_puts(payload, form)
    assert len(parsed) == 110
    assert all(isinstance(item, Cell) for item in parsed)
    assert turns.longest <= STEP_BYTES_MAX + BODY_BYTES_MAX


async def test_a_page_is_rendered_cell_by_cell(turns):
    """At most STEP_BYTES_MAX and one cell are encoded without a pause."""
    counting = msgspec.structs.replace(
        JSON, encode_one=lambda document: (turns.work(len(document["a"])), JSON.encode_one(document))[1]
    )
    documents = [{"a": "x" * size} for size in (50_000, 1_000_000) * 10]
    assert len(await views_within(documents, lambda document: document, counting, 16 << 20)) == 20
    assert turns.longest <= STEP_BYTES_MAX + BODY_BYTES_MAX


async def test_what_is_rendered_has_room_before_it_is_held(monkeypatch):
    """A body may be a thousand times as large as it is stored. So a page that outgrows its room waits for all of it,
    and holds nothing of the piece that didn't fit meanwhile.
    """
    monkeypatch.setattr("api.http.response._BESIDE_BYTES_MAX", 0)
    budget = ReadBudget(100, wait_s=60.0)
    first, second, other = (Held(budget, caller) for caller in "abc")
    await first.reserve(10)
    await second.reserve(20)
    await other.reserve(1)
    documents = [{"a": "x" * 22} for _ in range(2)]  # 30 bytes each
    encoded = []
    counting = msgspec.structs.replace(
        JSON, encode_one=lambda document: (encoded.append(1), JSON.encode_one(document))[1]
    )

    def render(held):
        return views_within(documents, lambda document: document, counting, 80, held)

    assert len(await render(first)) == 2
    assert budget.held_bytes == 101
    encoded.clear()
    waiting = asyncio.ensure_future(render(second))
    await asyncio.sleep(0)
    assert (len(encoded), waiting.done()) == (1, False)
    first.resize(0)
    assert len(await waiting) == 2
    assert budget.held_bytes == 81


async def test_cells_that_dont_fit_into_one_response_are_refused(monkeypatch):
    """As a whole, because it has no second page. A missing cell is null and takes no room."""
    monkeypatch.setattr("api.http.response.cell_view", lambda document: document)
    held = Held(ReadBudget(100, wait_s=0.0), "a")
    cells = [{"a": "x" * 22}, None, {"a": "y" * 22}]
    views = await all_views(cells, JSON, 60, held)
    assert [None if view is None else bytes(view)[6:7] for view in views] == [b"x", None, b"y"]
    with pytest.raises(TooLarge):
        await all_views(cells, JSON, 59, held)


HOSTILE = {
    "16 million nil": (MSGPACK, b"\x81\xa5cells\xdd" + (16_000_000).to_bytes(4, "big") + b"\xc0" * 16_000_000),
    "8 million numbers": (JSON, b'{"cells":[' + b"0," * 8_000_000 + b"0]}"),
    "1001 lines": (NDJSON, b"{}\n" * (ITEMS_MAX + 1)),
}


@pytest.mark.parametrize("kind", HOSTILE)
async def test_items_are_counted_before_they_are_made(monkeypatch, kind):
    """A batch of millions ends at one item too many: nothing of it was parsed."""
    monkeypatch.setattr(cell_routes, "_put_item", lambda *item: pytest.fail("parsed an item"))
    form, payload = HOSTILE[kind]
    with pytest.raises(TooLarge, match="at most 1000 items"):
        await parse_puts(payload, form)


async def test_blank_lines_are_no_items():
    """However many there are."""
    assert len(await parse_gets(b" \n" * 100_000 + JSON.encode(KEY) + b"\r\n\n", NDJSON)) == 1
    with pytest.raises(Invalid):
        await parse_gets(b"\n" * 100_000, NDJSON)


async def test_a_batch_may_have_a_thousand_items():
    """And no fewer than one."""
    assert len(await parse_gets(JSON.encode({"keys": [KEY] * ITEMS_MAX}), JSON)) == ITEMS_MAX
    with pytest.raises(Invalid):
        await parse_gets(b'{"keys":[]}', JSON)


async def test_what_is_beside_a_body_is_small():
    """A key of a megabyte is refused by its length, and fails alone."""
    large = {**KEY, "row_key": "x" * 5000, "body": {}}
    wrong, right = await parse_puts(JSON.encode({"cells": [large, {**KEY, "body": {}}]}), JSON)
    assert isinstance(wrong, TooLarge)
    assert isinstance(right, Cell)
    with pytest.raises(TooLarge):
        await parse_gets(JSON.encode({"keys": [{**KEY, "row_key": "x" * 5000}]}), JSON)


@pytest.mark.parametrize(("value", "count"), [(0, 850_000), (-100, 450_000), ("", 850_000)])
async def test_containers_of_messagepack_are_counted_in_pieces(monkeypatch, value, count):
    """Letters that look like containers have all values of the body looked at, one after the other."""
    body = MSGPACK.encode({"letters": "\u0440" * 60_000, "a": [value] * count})
    turns = []

    async def sleep(delay):
        turns.append(delay)

    monkeypatch.setattr(content.asyncio, "sleep", sleep)
    assert decode_body(await stored_body(body, MSGPACK, BODY_BYTES_MAX))["a"] == [value] * count
    assert len(turns) >= len(body) // (64 << 10)


async def test_a_messagepack_body_with_too_many_containers_is_never_decoded(monkeypatch):
    """A million empty arrays are as many objects."""
    monkeypatch.setattr(content, "_decode_msgpack", lambda raw: pytest.fail("decoded it"))
    with pytest.raises(Invalid, match="50000"):
        await stored_body(MSGPACK.encode({"a": [[]] * 1_000_000}), MSGPACK, BODY_BYTES_MAX)


def test_a_messagepack_body_has_so_many_containers():
    """Texts and numbers that look like them don't count."""
    texts = {"a": ["\u0430\u0440\u0430\u0440" * 20_000, 0x8080808080808080 - 2**63, "x" * 300]}
    MSGPACK.parse_body(MSGPACK.encode(texts))
    most = [[]] * 49_997
    MSGPACK.parse_body(MSGPACK.encode({**texts, "b": most}))
    for many in ([*most, []], [{}] * 60_000, [[0] * 3] * 50_000):
        with pytest.raises(Invalid, match="50000"):
            MSGPACK.parse_body(MSGPACK.encode({**texts, "b": many}))


async def test_others_really_have_their_turn():
    """A task that is ready runs before a long parse has ended."""
    cells = [{**KEY, "ref_key": n, "body": {"a": "x" * 500_000}} for n in range(4)]
    seen = []
    parse = asyncio.ensure_future(parse_puts(JSON.encode({"cells": cells}), JSON))
    asyncio.get_running_loop().call_soon(
        lambda: asyncio.get_running_loop().call_soon(lambda: seen.append(parse.done()))
    )
    await parse
    assert seen == [False]
