"""Every parser of what comes from outside takes any input: it returns, or raises one of our errors.

Inputs are valid ones, damaged at random. `make faults` tries 60,000 of them on each parser, `make test` a thousand.
"""

import base64
import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import pytest
import yaml

from api.http.content import JSON, MSGPACK, NDJSON, count_msgpack, decode, parse_msgpack
from api.index.search import parse_query
from api.routes import cells, triggers
from schemaless.access import parse_grant, parse_lifetime
from schemaless.cell import parse_column_name, parse_ref_key, parse_row_key, parse_time
from schemaless.codec import decode_cell, parse_json, parse_json_body
from schemaless.consume.start_at import parse_start
from schemaless.contract.parameters import parse_columns, parse_flag, parse_limit, parse_pairs, parse_role, parse_wait
from schemaless.errors import SchemalessError
from schemaless.index.definition import load_definition, parse_definition
from schemaless.location import parse_location, parse_shard_location
from schemaless.position import parse_digest, parse_position
from schemaless.record import KIND_CELL, KIND_HEADER, RECORD_VERSION, VERSION_HEADER, decode_record
from schemaless.stack.plan import load_plan
from schemaless.topology import load_topology, parse_topology
from schemaless.where import parse_where

INPUTS = 60_000 if os.environ.get("SCHEMALESS_FAULTS_LONG") else 1_000
MESSAGE_CHARACTERS_MAX = 12_000  # a message may quote what it refuses
HOSTILE = (
    b"\x00", b"\xff", b"\xed\xa0\x80", b"%", b"%ff", b"&", b"=", b":", b",", b"-1", b"0", b"1_0", b"9" * 400, b"1e999",
    b"NaN", b"null", b"true", b'"', b"'", b"`", b"\\u", b"\\ud800", b"[", b"]", b"[" * 2000, b"(" * 2000, b"{", b"}",
    b"not " * 50, b"\n", b"\r\n", b"\xe2\x80\xa8", b"\xc1", b"\xdf\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff",
    b"\xc7\xff", b"9999-12-31T23:59:60Z", b"0000-00-00", "\u0661".encode(), "\U0010ffff".encode(), b"../", b"$",
    b"a" * 5000,
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 2**63, 2**64, 10**400, 1.5, float("inf"), "", "x", "\ud800", "a" * 5000, [], {}, [[]],
    [{}], {"": None}, [None] * 100,
)  # fmt: skip
pytestmark = pytest.mark.faults

TEXTS = {
    parse_row_key: ["0e5f3a9c-1b7d-4c52-9a3e-0123456789ab"],
    parse_column_name: ["BASE", "billing.once"],
    parse_ref_key: ["1", "9223372036854775807"],
    parse_time: ["2013-01-01T10:00:00Z", "2013-01-01T10:00:00.123456+02:00"],
    parse_location: ["1:17", "17"],
    parse_shard_location: ["7:1:1000"],
    parse_position: ["1:17:00ff00ff00ff00ff", "17"],
    parse_digest: ["00ff00ff00ff00ff"],
    parse_where: ['status == "done" and fare.amount >= 10 or driver is null', "not (`odd name`.n in (1, 2.5, 'x'))"],
    parse_grant: ["schemaless:trips:write", "schemaless:*:admin"],
    load_definition: [
        Path(path).read_text() for path in ("examples/flights_by_tailnum.yaml", "examples/city_index.yaml")
    ],
}
FIELD_TEXTS = {
    parse_lifetime: ["90d", "12h"],
    parse_limit: ["100"],
    parse_flag: ["true"],
    parse_role: ["minion"],
    parse_wait: ["1.5"],
    parse_columns: ["BASE,STATUS"],
    triggers._parse_cursor: [base64.urlsafe_b64encode(b"[1,2,3]").decode()],
}
CELL = {
    "row_key": "0e5f3a9c-1b7d-4c52-9a3e-0123456789ab",
    "column_name": "BASE",
    "ref_key": 1,
    "body": {"a": [1, None]},
}
ORDERS: dict[type, Any] = {
    triggers.ParkedRequest: {
        "filter": {"cause": "error", "since": "2013-01-01T10:00:00Z"},
        "rate": 10,
        "dry_run": True,
    },
    triggers.SeekRequest: {"to": ["7:1:1000"], "shards": [7], "dry_run": True},
}
TOPOLOGY = {
    "version": 2,
    "clusters": {
        "a": [
            {"name": "a1", "host": "127.0.0.1", "port": 3306, "user": "u", "password": "p"},
            {"name": "a2", "host": "h", "port": 3307, "user": "u", "password": "p", "socket": "s"},
        ]
    },
}
INDEX = Path("examples/flights_by_tailnum.yaml").read_text()


def damaged(sample: bytes, rng: random.Random) -> bytes:
    """Returns the sample with one to four damages: bytes flipped, cut, doubled, or hostile ones put in."""
    data = bytearray(sample)
    for _ in range(rng.randint(1, 4)):
        at = rng.randint(0, len(data))
        match rng.randrange(5):
            case 0 if at < len(data):
                data[at] = rng.randrange(256)
            case 1:
                del data[at : at + rng.randint(1, 8)]
            case 2:
                data[at:at] = data[at : at + rng.randint(1, 32)] * rng.randint(1, 3)
            case _:
                data[at:at] = rng.choice(HOSTILE)
    return bytes(data)


def misshapen(document: Any, rng: random.Random) -> Any:
    """Returns a copy in which one value somewhere is another one, missing, or has a foreign neighbour."""
    if rng.random() < 0.25 or not isinstance(document, dict | list) or not document:
        return rng.choice(VALUES)
    if isinstance(document, list):
        at = rng.randrange(len(document))
        return [*document[:at], misshapen(document[at], rng), *document[at + 1 :], *document[: rng.randrange(2)]]
    name = rng.choice(list(document))
    changed = {**document, name: misshapen(document[name], rng)}
    if rng.random() < 0.2:
        changed.pop(name)
    if rng.random() < 0.1:
        changed[rng.choice(("", "x", "\ud800", name.upper()))] = rng.choice(VALUES)
    return changed


def attack(parse: Callable[[Any], object], inputs: Iterator[Any]) -> None:
    """Raises AssertionError for an input that raises anything but our errors."""
    refused = 0
    for given in inputs:
        try:
            parse(given)
        except SchemalessError as error:
            refused += 1
            if len(str(error)) > MESSAGE_CHARACTERS_MAX:
                raise AssertionError(f"{repr(given)[:500]} is answered at length: {str(error)[:200]}") from error
        except Exception as error:
            raise AssertionError(f"{repr(given)[:500]} raises {error!r}") from error
    assert refused, "none of the inputs was damaged"


def texts(samples: Sequence[str], rng: random.Random, inputs: int = INPUTS) -> Iterator[str]:
    return (
        damaged(rng.choice(samples).encode(), rng).decode("utf-8", rng.choice(("replace", "ignore")))
        for _ in range(inputs)
    )


def payloads(samples: Sequence[bytes], rng: random.Random, inputs: int = INPUTS) -> Iterator[bytes]:
    return (damaged(rng.choice(samples), rng) for _ in range(inputs))


def documents(sample: Any, rng: random.Random) -> Iterator[Any]:
    return (misshapen(sample, rng) for _ in range(INPUTS))


@pytest.mark.parametrize("parse", TEXTS, ids=lambda parse: parse.__name__)
def test_a_text_is_parsed_or_refused(parse: Callable[[str], object], chance: random.Random):
    """Keys, locations, times, conditions and definitions."""
    if parse is parse_grant:  # what is no grant of ours is None
        for given in texts(TEXTS[parse], chance):
            parse(given)
    else:
        slow = parse is load_definition  # its YAML
        attack(parse, texts(TEXTS[parse], chance, INPUTS // 50 if slow else INPUTS))


@pytest.mark.parametrize("parse", FIELD_TEXTS, ids=lambda parse: parse.__name__)
def test_a_parameter_is_parsed_or_refused(parse: Callable[[str, str], object], chance: random.Random):
    """The values of parameters of a URL."""
    attack(lambda given: parse(given, "field"), texts(FIELD_TEXTS[parse], chance))


@pytest.mark.parametrize("form", [JSON, NDJSON, MSGPACK], ids=lambda form: form.media_type)
@pytest.mark.parametrize("parse", [cells.parse_puts, cells.parse_gets], ids=lambda parse: parse.__name__)
async def test_a_batch_is_parsed_or_refused(parse: Callable[..., Any], form: Any, chance: random.Random):
    """A bad item may be an item's error. A payload that can't be parsed is the error of the whole."""
    member = "cells" if parse is cells.parse_puts else "keys"
    item = CELL if parse is cells.parse_puts else {name: CELL[name] for name in ("row_key", "column_name", "ref_key")}
    sample = form.encode([item, item]) if form is NDJSON else form.encode({member: [item, item]})
    refused = 0
    for given in payloads([sample], chance):
        try:
            await parse(given, form)
        except SchemalessError:
            refused += 1
        except Exception as error:
            raise AssertionError(f"{repr(given)[:500]} raises {error!r}") from error
    assert refused


@pytest.mark.parametrize("parse", [parse_json, parse_json_body, parse_msgpack], ids=lambda parse: parse.__name__)
def test_a_body_is_parsed_or_refused(parse: Callable[[bytes], object], chance: random.Random):
    """Bodies are bounded before they are decoded."""
    body = {"a": [1, -2, 3.5, None, True, "text"], "b": {"c": {"d": []}}}
    encode = msgpack.packb if parse is parse_msgpack else msgspec.json.encode
    attack(parse, payloads([encode(body)], chance))


@pytest.mark.parametrize("shape", ORDERS, ids=lambda shape: shape.__name__)
@pytest.mark.parametrize("form", [JSON, MSGPACK], ids=lambda form: form.media_type)
def test_an_order_is_decoded_or_refused(shape: type, form: Any, chance: random.Random):
    """What operators send has a shape."""
    decoder = form.decoder(shape)
    attack(lambda given: decode(given, decoder, "order"), payloads([form.encode(ORDERS[shape])], chance))


def test_a_query_string_is_parsed_or_refused(chance: random.Random):
    """First its parameters, then what an index is asked."""
    definition = load_definition(INDEX)
    samples = [
        b"tailnum=N14228&time_hour.lt=2013-02-01T00:00:00Z&limit=10&order=time_hour&desc=true",
        b"tailnum=N1&tailnum=N2&order=time_hour&result.prefix=SU&fields=tailnum&include=BASE,STATUS&verify=true",
        b"tailnum.in=N1,N2&order=time_hour&time_hour.between=2013-02-01T00:00:00Z,2014-01-01T00:00:00Z&after=7:1:9&wait=1",
        b"tailnum=N1&time_hour.isnull=true&cursor=WyIwMDAwIixbXSwiMDAiLDBd&explain=true",
    ]
    attack(lambda given: parse_query(definition, 64, parse_pairs(given)), payloads(samples, chance))


@pytest.mark.parametrize("parse", [parse_definition, parse_where, parse_topology], ids=lambda parse: parse.__name__)
def test_a_document_is_parsed_or_refused(parse: Callable[[Any], object], chance: random.Random):
    """Any value may stand at any place of it."""
    sample: Any = {
        parse_definition: {**yaml.safe_load(INDEX), "where": [{"field": "tailnum", "op": "ne", "value": "N0"}]},
        parse_where: [{"field": "a.b", "op": "eq", "value": 3}, {"field": "c", "op": "lt", "value": "x"}],
        parse_topology: TOPOLOGY,
    }[parse]
    attack(parse, documents(sample, chance))


@pytest.mark.parametrize("load", [load_topology, load_plan], ids=lambda load: load.__name__)
def test_a_damaged_file_is_told(load: Callable[[Path], object], tmp_path: Path, chance: random.Random):
    """The topology and the plan of a stack are files that people edit."""
    plan = {"format": 3, "flavour": "mariadb", "ports": {"api-0": 8000}, "accounts": {}}
    path = tmp_path / "stack.json"
    sample = json.dumps(TOPOLOGY if load is load_topology else plan).encode()

    def write_and_load(content: bytes) -> object:
        path.write_bytes(content)
        return load(path if load is load_topology else tmp_path)

    attack(write_and_load, payloads([sample], chance))


def test_a_record_of_kafka_is_decoded_or_foreign(chance: random.Random):
    """Anybody may write to the topic, so no bytes may end a consumer."""
    value = msgpack.packb(
        {
            "row_key": "0e5f3a9c-1b7d-4c52-9a3e-0123456789ab",
            "column_name": "BASE",
            "ref_key": 1,
            "shard": 3,
            "generation": 1,
            "added_id": 7,
            "created_at": 1,
            "body": b"x\x9c\x03\x00\x00\x00\x00\x01",
        }
    )
    headers = [(VERSION_HEADER, RECORD_VERSION), (KIND_HEADER, KIND_CELL)]
    for given in payloads([value], chance):
        decode_record(given, headers)
        decode_record(value, [(name, damaged(content, chance)) for name, content in headers])
        with suppress(SchemalessError):
            decode_cell(given)


def test_starts_of_a_program_are_parsed_or_refused(chance: random.Random):
    """`--from` may be given several times."""
    samples = ["7:1:1000", "end", "beginning", "2026-01-31T00:00:00Z"]
    attack(parse_start, ([one, two] for one, two in zip(texts(samples, chance), texts(samples, chance), strict=True)))


def test_counting_containers_ends(chance: random.Random):
    """It reads lengths that the bytes name, which may lie."""
    for given in payloads([b"\x91" * 60_000, b"\xdd\x00\x00\xff\xff" * 12_000], chance, INPUTS // 20):
        with suppress(SchemalessError):
            for _ in count_msgpack(given):
                pass
