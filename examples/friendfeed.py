"""friendfeed: the store of "How FriendFeed uses MySQL to store schema-less data", on cells and indexes of Schemaless.

    python -m examples.friendfeed --datastore mezzanine

Entities are property bags under an id. An index is declared in one line, and another one is added while entities are
written. `get_all` reads an index and the entities, and leaves out what isn't true any more, with one request a page.
"""

from __future__ import annotations

import argparse
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any

from schemaless import Client

COLUMN = "ENTITY"
USERS, ENTITIES = 5, 60
PAUSE_S = 0.2
Entity = dict[str, Any]
KINDS: Mapping[str, Mapping[str, Any]] = {
    "id": {"type": "uuid"},
    "user_id": {"type": "uuid"},
    "link": {"type": "string", "length": 735},
    "published": {"type": "int"},
}


class EntityIndex:
    """Entities by properties. The first one is what it is sharded on."""

    def __init__(self, name: str, properties: Sequence[str]) -> None:
        self.name = name
        self.properties = properties

    @property
    def definition(self) -> dict[str, Any]:
        fields = [{"name": each, "column": COLUMN, "path": each, **KINDS[each]} for each in self.properties]
        return {"name": self.name, "shard_field": self.properties[0], "fields": fields}

    def get_all(self, store: EntityStore, **properties: Any) -> Iterator[Entity]:
        """Yields the entities that have these properties now: the filter of the original, by `verify`."""
        for entry in store.client.index(self.name).entries(**properties, include=[COLUMN], verify=True):
            cell = entry.cells[COLUMN]
            if cell is not None:
                yield cell.body


class EntityStore:
    """Entities by id. Each put is a new version of its entity."""

    def __init__(self, client: Client, indexes: Sequence[EntityIndex]) -> None:
        self.client = client
        for index in indexes:
            self.add(index)

    def add(self, index: EntityIndex) -> None:
        """Adds an index, which is built from the entities that exist while others are put."""
        self.client.index(index.name).define(index.definition)

    def wait_for(self, index: EntityIndex, until: datetime, **properties: Any) -> None:
        """Waits until an index is built, and has every entity from before a time."""
        asked = self.client.index(index.name)
        asked.wait()
        while (complete := asked.query(**properties, limit=1).freshness.complete_until) is None or complete <= until:
            time.sleep(PAUSE_S)

    def put(self, entity: Entity) -> datetime:
        """Stores an entity. Returns when it was stored."""
        created_at = self.client.put(entity["id"], COLUMN, entity).created_at
        assert created_at is not None, "the next version is stored or refused, never buffered"
        return created_at

    def get(self, entity_id: str) -> Entity | None:
        cell = self.client.get_cell_latest(entity_id, COLUMN)
        return cell.body if cell else None


def new_entity(user_id: str, number: int) -> Entity:
    return {
        "id": str(uuid.uuid4()),
        "user_id": user_id,
        "feed_id": user_id,
        "title": f"We just launched a new backend system for FriendFeed! ({number})",
        "link": f"http://friendfeed.example/e/{number}",
        "published": 1235697046 + number,
    }


def run(client: Client) -> None:
    """Fills a store, adds the `link` index while it is being filled, and asks both indexes."""
    user_id_index = EntityIndex("index_user_id", ["user_id", "published"])
    link_index = EntityIndex("index_link", ["link"])
    store = EntityStore(client, [user_id_index])
    users = [str(uuid.uuid4()) for _ in range(USERS)]
    entities = [new_entity(users[n % USERS], n) for n in range(ENTITIES)]
    with ThreadPoolExecutor(8) as pool:
        puts = pool.map(store.put, entities)
        store.add(link_index)
        stored_at = list(puts)
    moved = {**entities[0], "user_id": users[1]}
    stored_at.append(store.put(moved))
    assert store.get(moved["id"]) == moved
    link = entities[7]["link"]
    store.wait_for(user_id_index, max(stored_at), user_id=users[0])
    store.wait_for(link_index, max(stored_at), link=link)
    for number, user in enumerate(users):
        found = list(user_id_index.get_all(store, user_id=user))
        print(f"user {number}: {len(found)} entities")
    (first, *_) = link_index.get_all(store, link=link)
    print(f"{link}: {first['title']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--datastore", default="mezzanine")
    with Client(datastore=parser.parse_args().datastore) as client:
        run(client)


if __name__ == "__main__":
    main()
