"""Each raw request of the table is answered as it says, the connection stays in step, and what is stored is stored."""

import socket
import uuid
from contextlib import closing

import pytest

from tests.raw_connection import ALIVE, PROBE, Talk, bytes_of, statuses
from tests.raw_requests import ROWS


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_raw_request(api, shared_datastore, row):
    """A request sent after the answer is answered, or the connection is at its end."""
    sent, path = bytes_of(row, shared_datastore.name)
    with closing(Talk(api.port)) as talk:
        talk.send(*sent)
        if row.half_close:
            talk.half_close()
        assert statuses(talk, row) == [row.answer, *row.behind]
        if not row.ends:
            talk.send(PROBE)
            assert talk.answer().body == ALIVE
        assert talk.answer() is None
    assert (api.client.get(path).status_code == 200) == row.stored


@pytest.mark.parametrize("row", [row for row in ROWS if not (row.half_close or row.is_open)], ids=lambda row: row.name)
def test_a_request_in_the_same_piece(api, shared_datastore, row):
    """A request right behind the row is answered in order, or never."""
    sent, path = bytes_of(row, shared_datastore.name)
    with closing(Talk(api.port)) as talk:
        talk.send(*sent[:-1], sent[-1] + PROBE)
        assert statuses(talk, row) == [row.answer, *row.behind]
        if not row.ends:
            assert talk.answer().body == ALIVE
        assert talk.answer() is None
    assert (api.client.get(path).status_code == 200) == row.stored


@pytest.mark.parametrize(("fields", "version"), [(b"", b"1.0"), (b"connection: close\r\n", b"1.1")])
def test_a_payload_that_is_refused_is_taken_to_its_end(api, shared_datastore, fields, version):
    """A proxy that is reset while it sends answers for itself, and the client never sees why."""
    size = 12 << 20
    head = b"PUT /v1/%b/cells/%b/BASE/1 HTTP/%b\r\nhost: localhost\r\n%bcontent-length: %d\r\n\r\n"
    row_key = str(uuid.uuid4()).encode()
    with socket.create_connection(("127.0.0.1", api.port), timeout=60) as connection:
        connection.sendall(head % (shared_datastore.name.encode(), row_key, version, fields, size))
        assert connection.recv(65536).startswith(b"HTTP/1.1 413 ")
        for _ in range(size >> 20):
            connection.sendall(bytes(1 << 20))
        while connection.recv(65536):
            pass


FOLLOW = "GET /v1/{}/shards/0/cells?follow=true HTTP/{}\r\nhost: localhost\r\naccept: text/event-stream\r\n\r\n"


def test_a_stream_of_http_1_0_has_no_chunks(api, shared_datastore):
    """Its client would take the sizes for events. The connection ends with the stream."""
    with closing(Talk(api.port)) as talk:
        talk.send(FOLLOW.format(shared_datastore.name, "1.0").encode())
        lines = [talk.line() for _ in range(14)]
    assert b"connection: close\r\n" in lines
    assert not any(line.startswith(b"transfer-encoding") for line in lines)
    assert lines[lines.index(b"\r\n") + 1].startswith(b"event: ")


def test_a_stream_ends_in_order_when_its_client_closes_its_sending_side(api, shared_datastore):
    """Nobody can tell it from one that left, so it keeps no place. What it has been sent is whole."""
    with closing(Talk(api.port)) as talk:
        talk.send(FOLLOW.format(shared_datastore.name, "1.1").encode())
        talk.half_close()
        assert talk.answer().status == 200
        assert talk.answer() is None
