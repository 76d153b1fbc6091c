"""The comparator: a plain FastAPI + PyMySQL tier, as one would write it first.

A pydantic body, a `def` endpoint, a pooled connection, INSERT, COMMIT; one unsharded table on each master. With
--copies 2 the same put first goes, durable too, to the other master, as a buffered write does. No batching, no
dense ids, no comparison of bodies. Served by uvicorn with the settings of `python -m api`.
"""

from __future__ import annotations

import argparse
import json
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import pymysql
import uvicorn
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel

from schemaless.topology import Node, load_topology

CONNECTIONS_MAX = 40  # one for each thread in which `def` endpoints run

CREATE = """
CREATE DATABASE IF NOT EXISTS plain;
CREATE TABLE IF NOT EXISTS plain.cell (
    id BIGINT UNSIGNED NOT NULL AUTO_INCREMENT PRIMARY KEY,
    row_key BINARY(16) NOT NULL,
    column_name VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    ref_key BIGINT NOT NULL,
    body MEDIUMBLOB NOT NULL,
    created_at DATETIME(6) NOT NULL,
    UNIQUE KEY cell (row_key, column_name, ref_key)
) ENGINE=InnoDB;
CREATE TABLE IF NOT EXISTS plain.buffered LIKE plain.cell;
GRANT SELECT, INSERT, UPDATE, DELETE ON plain.* TO '%s'@'%%'
"""
INSERT = "INSERT INTO plain.{} (row_key, column_name, ref_key, body, created_at) VALUES (%s, %s, %s, %s, NOW(6))"
NEWEST = (
    "SELECT ref_key, body, created_at FROM plain.cell WHERE row_key = %s AND column_name = %s"
    " ORDER BY ref_key DESC LIMIT 1"
)


class TripBody(BaseModel):
    driver_uuid: UUID
    rider_uuid: UUID
    city: str
    status: str
    requested_at: str
    distance_m: int
    fare: float
    surge: float
    pickup: list[float]


class Pool:
    """Open connections to one master, at most `CONNECTIONS_MAX`."""

    def __init__(self, node: Node, *, autocommit: bool) -> None:
        self._idle: queue.LifoQueue[pymysql.Connection] = queue.LifoQueue()
        for _ in range(CONNECTIONS_MAX):
            self._idle.put(connect(node, autocommit=autocommit))

    @contextmanager
    def connection(self) -> Iterator[pymysql.Connection]:
        connection = self._idle.get()
        try:
            yield connection
        finally:
            self._idle.put(connection)


def connect(node: Node, *, autocommit: bool = False, client_flag: int = 0) -> pymysql.Connection:
    return pymysql.connect(
        unix_socket=node.socket,
        user=node.user,
        password=node.password,
        charset="utf8mb4",
        autocommit=autocommit,
        client_flag=client_flag,
        ssl_disabled=True,
    )


def make_app(masters: list[Node], copies: int) -> FastAPI:
    app = FastAPI()
    writers = [Pool(master, autocommit=False) for master in masters]
    readers = [Pool(master, autocommit=True) for master in masters]

    @app.put("/cells/{row_key}/{column}/{ref_key}", status_code=201)
    def put(row_key: UUID, column: str, ref_key: int, body: TripBody) -> dict[str, Any]:
        home = row_key.int % len(writers)
        cell = (row_key.bytes, column, ref_key, body.model_dump_json())
        if copies > 1:
            insert(writers[home - 1], "buffered", cell)
        identity = insert(writers[home], "cell", cell)
        return {"status": "stored", "row_key": row_key, "column_name": column, "ref_key": ref_key, "id": identity}

    @app.get("/cells/{row_key}/{column}")
    def newest(row_key: UUID, column: str) -> dict[str, Any]:
        with readers[row_key.int % len(readers)].connection() as connection, connection.cursor() as cursor:
            cursor.execute(NEWEST, (row_key.bytes, column))
            found = cursor.fetchone()
        if found is None:
            raise HTTPException(404)
        ref_key, body, created_at = found
        cell = {"row_key": row_key, "column_name": column, "ref_key": ref_key, "created_at": created_at}
        return {**cell, "body": json.loads(body)}

    return app


def insert(pool: Pool, table: str, cell: tuple[bytes, str, int, str]) -> int:
    with pool.connection() as connection:
        with connection.cursor() as cursor:
            cursor.execute(INSERT.format(table), cell)
            identity = cursor.lastrowid
        connection.commit()
    return identity


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--topology", type=Path, required=True)
    options.add_argument("--port", type=int, required=True)
    options.add_argument("--copies", type=int, default=1)
    given = options.parse_args()
    masters = [cluster.nodes[0] for cluster in load_topology(given.topology).clusters.values()]
    app = make_app(masters, given.copies)
    uvicorn.run(
        app,
        port=given.port,
        loop="uvloop",
        http="httptools",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        log_level="warning",
    )


if __name__ == "__main__":
    main()
