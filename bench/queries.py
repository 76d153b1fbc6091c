"""An index query by the shard field with a range: one page of fifty over HTTP, beside the same SELECT by PyMySQL.

The API adds a request to what a server does. So beside it stands the SELECT and a request of the API that does nothing,
one after the other.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable
from urllib.parse import urlencode

import pymysql

from bench import plain_tier
from bench.cleaning import build, define_active
from bench.figures import Comparison, Values, at_most, percentile
from bench.filling import fill_ours
from bench.rounds import alternate
from bench.scale import Scale
from bench.servers import BenchStack, our_api
from bench.trips import TripMaker
from schemaless.index.definition import parse_definition

LIMIT = 50
QUERIES = 200  # a round
CITY = "Berlin"
SINCE = "2026-03-01T00:00:00Z"
DEFINITION = {
    "name": "by_city",
    "shard_field": "city",
    "fields": [
        {"name": "city", "column": "BASE", "path": "city", "type": "string", "length": 40},
        {"name": "requested_at", "column": "BASE", "path": "requested_at", "type": "datetime"},
    ],
    "stored": [
        {"name": "fare", "column": "BASE", "path": "fare", "type": "float"},
        {"name": "distance_m", "column": "BASE", "path": "distance_m", "type": "int"},
    ],
}


def measure(stack: BenchStack, scale: Scale) -> list[Comparison]:
    trips = TripMaker(seed=13).make(scale.rows_read)
    fill_ours(stack, (trip.cell(stack.datastore.shards) for trip in trips))
    index = parse_definition(DEFINITION)
    build(stack, index)
    define_active(stack, index)
    asked = {"city": CITY, "requested_at.gte": SINCE, "limit": LIMIT}
    path = f"{stack.prefix}/indexes/by_city/entries?{urlencode(asked)}"
    with our_api(stack) as port:
        api = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        explained = json.loads(_get(api, f"{path}&explain=true"))
        assert len(explained["entries"]) == LIMIT
        (part,) = [part for part in explained["explain"] if part["rows_read"]]
        server: pymysql.Connection = plain_tier.connect(
            stack.topology.cluster(part["cluster"]).nodes[0], autocommit=True
        )

        def ours() -> None:
            assert len(_get(api, path)) == size

        def theirs() -> None:
            with server.cursor() as cursor:
                cursor.execute(part["sql"])
                rows = cursor.fetchall()
            assert len(rows) >= LIMIT
            _get(api, "/healthz")

        size = len(_get(api, path))
        with server:
            mine, others = alternate(scale.rounds, lambda: _p50_ms(ours), lambda: _p50_ms(theirs))
        api.close()
    what = f"a page of {LIMIT} by the shard field and a range: p50"
    return [Comparison(what, "ms", Values(tuple(mine)), Values(tuple(others)), at_most(1.3))]


def _p50_ms(call: Callable[[], None]) -> float:
    seconds = []
    for _ in range(QUERIES):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return 1000 * percentile(seconds, 50)


def _get(connection: http.client.HTTPConnection, path: str) -> bytes:
    connection.request("GET", path)
    answer = connection.getresponse()
    body = answer.read()
    assert answer.status == 200, body
    return body
