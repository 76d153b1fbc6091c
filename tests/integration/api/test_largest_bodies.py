"""Bodies at the limit pass all the way: put, MySQL, topic, consumer (I14)."""

import hashlib
import json
import string
import uuid

import pytest

from schemaless.audit.run import audit
from schemaless.bus.topics import ensure_topics
from schemaless.codec import decode_body
from tests.consumer_harness import running_consumer, write_program
from tests.log_harness import running_tailers, wait_for_cells
from tests.seed import seeded
from tests.waiting import until

pytestmark = pytest.mark.storage

BODY_BYTES_MAX = 1 << 20
NOISE = seeded("largest bodies")
PROGRAM = """
import hashlib, json, os, pathlib
from schemaless import trigger

CALLS = os.open(pathlib.Path(__file__).parent / "calls", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

@trigger(column="BASE")
def note(cell):
    text = json.dumps(dict(cell.body), separators=(",", ":"))
    os.write(CALLS, f"{cell.row_key} {hashlib.sha256(text.encode()).hexdigest()}\\n".encode())
"""


def text(bytes_max):
    """Random characters: JSON and MessagePack need as many bytes, and compression saves little."""
    noise = "".join(NOISE.choices(string.ascii_letters + string.digits + "-_", k=bytes_max - len('{"noise":""}')))
    return '{"noise":"' + noise + '"}'


def numbers(bytes_max):
    """Seven bytes each as sent, nine in MessagePack, of which compression finds little: the stored form is larger."""
    count = (bytes_max - len('{"n":[]}') + 1) // 7
    return '{"n":[' + ",".join(f"{NOISE.randint(100, 999)}e{NOISE.randint(10, 99)}" for _ in range(count)) + "]}"


def digest(sent):
    return hashlib.sha256(json.dumps(json.loads(sent), separators=(",", ":")).encode()).hexdigest()


def noted(folder):
    path = folder / "calls"
    return dict(line.split() for line in path.read_text().splitlines()) if path.exists() else {}


def await_noted(folder, wanted):
    until(lambda: noted(folder) == wanted, lambda: f"{len(noted(folder))} of {len(wanted)} calls")


@pytest.fixture
def consuming(running, kafka, make_datastore, tmp_path):
    """A datastore with a tailer and a trigger program that is up and reads the topic."""
    datastore = make_datastore(shards=2, partitions=1)
    ensure_topics(kafka, datastore)
    program = write_program(tmp_path, "largest", PROGRAM)
    settings = {"topology": running.path, "kafka": kafka}
    with (
        running_tailers(1, running.path, kafka, datastore),
        running_consumer(["consumers", program, "--datastore", datastore.name], settings),
    ):
        yield datastore


def test_bodies_at_the_limit_reach_the_consumers(api, running, consuming, kafka, tmp_path):
    """One that compression doesn't make smaller, and one whose stored form is larger than what was sent."""
    put = api.at(consuming)
    sent = {str(uuid.uuid4()): body for body in ('{"n":1}', text(BODY_BYTES_MAX), numbers(BODY_BYTES_MAX))}
    for row_key, body in sent.items():
        assert put("PUT", f"/cells/{row_key}/BASE/1", content=body).status_code in (201, 202)
        await_noted(tmp_path, {key: digest(sent[key]) for key in list(sent)[: list(sent).index(row_key) + 1]})
    cells = wait_for_cells(kafka, consuming, len(sent))
    assert {str(uuid.UUID(bytes=cell.row_key)): decode_body(cell.body) for cell in cells} == {
        row_key: json.loads(body) for row_key, body in sent.items()
    }
    assert [len(body) > BODY_BYTES_MAX - 8 for body in sent.values()] == [False, True, True]
    assert max(len(cell.body) for cell in cells) > BODY_BYTES_MAX
    assert audit(running.topology, kafka, consuming, stall_s=5).findings.named == []


def test_one_byte_more_is_refused(api, shared_datastore):
    """By the door, so nothing larger is ever met further in."""
    body = text(BODY_BYTES_MAX + 1)
    answer = api.at(shared_datastore)("PUT", f"/cells/{uuid.uuid4()}/BASE/1", content=body)
    assert answer.status_code == 413
