"""/erase and /erasures: bodies that go for good, and what came of that (I19)."""

from __future__ import annotations

import secrets

from msgspec import UNSET

from api.http.serving import Asked, serves
from schemaless.cell import created_at_text, row_key_text
from schemaless.contract import erasures as contract
from schemaless.contract.erasures import EraseRequest, EraseView, ErasurePlaceView, ErasureView
from schemaless.errors import Invalid, NotFound
from schemaless.ops import erasures
from schemaless.ops.erasures import ErasurePlace
from schemaless.sharding import shard_of
from schemaless.storage import erasure_table
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.erasure_table import Erasure
from schemaless.storage.failover import ask_clusters

_ID_BITS = 63
_AGAIN_US = 60_000_000


@serves(contract.ERASE)
async def post_erase(asked: Asked[EraseRequest]) -> tuple[int, EraseView]:
    storage, datastore, wanted = asked.state.storage, asked.datastore, asked.payload
    target = contract.target_of(wanted)
    asked.request.action = str(target)
    number, shard = secrets.randbits(_ID_BITS), shard_of(target.row_key, datastore.shards)
    matched, now = await erasures.matched(storage, datastore, *target)
    erasure = Erasure(number, datastore.name, shard, *target, wanted.reason.strip(), asked.who, now)
    if not matched:
        again = None if wanted.dry_run else await _ordered_before(storage, erasure)
        if again is None:
            raise NotFound(f"there is nothing to erase of {target}")
        return 202, EraseView(again.id, 0, again.id)
    if wanted.dry_run:
        return 200, EraseView(None, matched, None)
    asked.request.action = f"{target} erasure={erasure.id}"
    await erasures.order(storage, datastore, erasure)
    return 202, EraseView(erasure.id, matched, erasure.id)


async def _ordered_before(storage: AsyncStorage, erasure: Erasure) -> Erasure | None:
    """Returns the erasure of a client that sends its order again, because the answer was lost."""
    answers = await ask_clusters(
        storage, storage.topology.clusters, erasure_table.of_row, erasure.datastore, erasure.row_key
    )
    same = [
        found
        for rows in answers.found.values()
        for found in rows
        if (found.column_name, found.ref_key, found.reason, found.who)
        == (erasure.column_name, erasure.ref_key, erasure.reason, erasure.who)
        and found.ordered_at > erasure.ordered_at - _AGAIN_US
    ]
    return max(same, key=lambda found: found.ordered_at, default=None)


@serves(contract.ERASURE)
async def get_erasure(asked: Asked[None]) -> ErasureView:
    text, state, datastore = asked.path["erasure"], asked.state, asked.datastore
    if len(text) != 16 or not set(text) <= set("0123456789abcdef") or (number := int(text, 16)) >> _ID_BITS:
        raise Invalid("erasure", "is the 16 hexadecimal digits that an order answered")
    found = await erasures.report(state.storage, datastore, number, state.settings.kafka)
    if found is None:
        raise NotFound(f"there is no erasure {text}")
    places, erasure = found.places, found.erasure
    if asked.of(contract.VERIFY):
        places = await erasures.verify(state.storage, datastore, number)
    return ErasureView(
        erasure.id,
        found.state,
        row_key_text(erasure.row_key),
        erasure.column_name,
        erasure.ref_key,
        erasure.reason,
        erasure.who,
        created_at_text(erasure.ordered_at),
        list(map(_place_view, places)),
    )


def _place_view(place: ErasurePlace) -> ErasurePlaceView:
    until = UNSET if place.remains_until is None else created_at_text(place.remains_until)
    why = UNSET if place.not_searched is None else place.not_searched
    return ErasurePlaceView(place.place, place.found, place.removed, until, why)


ROUTES = (post_erase, get_erasure)
