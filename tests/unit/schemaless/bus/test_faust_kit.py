"""Parts of the Faust kit that need no broker: what an agent is given, and which offset is committed."""

import asyncio
import logging
from collections import defaultdict, deque
from types import SimpleNamespace

import faust
import pytest
from faust.exceptions import ValueDecodeError
from faust.types import TP
from faust.types.tuples import Message
from hypothesis import given
from hypothesis import strategies as st

from schemaless import cells_topic, faust_app
from schemaless.bus.faust_transport import FETCH_PAUSE_S, CorrectedConsumer, keep_fetches_apart
from schemaless.codec import encode_record
from schemaless.found_cell import found_cell
from tests.topic_harness import stored_cell

pytestmark = pytest.mark.filterwarnings("ignore")

PARTITION = TP("t", 0)
HEADERS = [("v", b"1"), ("kind", b"cell")]


def message(value, offset=7):
    return Message("t", 0, offset, 0.0, 0, HEADERS, b"key", value, None)


@pytest.mark.parametrize("make", [faust_app, lambda name, kafka: faust.App(name, broker=f"kafka://{kafka}")])
async def test_an_agent_is_given_cells_and_no_error(make):
    """In our app and in a plain one: foreign records are counted, named, and never thrown into the agent."""
    topic = cells_topic(make("kit", "127.0.0.1:9"), "mezzanine")
    cell = stored_cell(0, 4)
    event = await topic.decode(message(encode_record(cell)), propagate=True)
    assert (event.value, event.key) == (found_cell(cell), b"key")
    foreign = message(b"not ours")
    with pytest.raises(ValueDecodeError) as raised:
        await topic.decode(foreign, propagate=True)
    await topic.on_value_decode_error(raised.value, foreign)
    assert topic.queue.empty()
    assert (topic.counts.cells, topic.counts.foreign, topic.counts.named[0].offset) == (1, 1, 7)
    assert topic.clone(is_iterator=True).counts is topic.counts


def test_an_app_makes_no_folders_where_it_keeps_nothing_in_files(tmp_path, monkeypatch):
    """Faust makes `NAME-data` in the folder where the program is started."""
    monkeypatch.chdir(tmp_path)
    faust_app("kit", "127.0.0.1:9")._create_directories()
    assert list(tmp_path.iterdir()) == []
    faust_app("kit", "127.0.0.1:9", store="rocksdb://")._create_directories()
    assert [each.name for each in tmp_path.iterdir()] == ["kit-data"]


def test_an_outage_of_kafka_is_some_lines_in_the_log_of_a_users_app(caplog):
    """aiokafka writes fifty a second, of several loggers. One that is counted says so later."""
    faust_app("kit", "127.0.0.1:9")
    faust_app("kit", "127.0.0.1:9")
    for n in range(500):
        logging.getLogger("aiokafka").error("Unable connect to %s: %s", n, n)
        logging.getLogger("aiokafka.conn").error("Unable to request metadata from %s", n)
    logging.getLogger("of_the_user").error("mine")
    assert 1 <= sum(record.name.startswith("aiokafka") for record in caplog.records) <= 10
    assert caplog.records[-1].name == "of_the_user"


async def test_an_agent_that_ends_with_what_is_no_exception_crashes_the_app():
    """Faust would forget it, and its partitions would stand in silence."""

    async def fail(stream):
        raise GeneratorExit

    class Actor:
        crashed = None

        async def crash(self, error):
            self.crashed = error

    app, actor = faust_app("kit", "127.0.0.1:9"), Actor()
    agent = app.agent(cells_topic(app, "mezzanine"))(fail)
    agent.supervisor = SimpleNamespace(wakeup=lambda: None)
    await agent._execute_actor(fail(None), actor)
    assert "raised GeneratorExit" in str(actor.crashed)


def consumer():
    """As much of one as its book-keeping needs."""
    made = CorrectedConsumer.__new__(CorrectedConsumer)
    made._handed_out, made._finished = defaultdict(deque), defaultdict(set)
    made._acked, made._acked_index = defaultdict(list), defaultdict(set)
    made._committed_offset = defaultdict(lambda: None)
    return made


@given(st.sets(st.integers(0, 60), min_size=1), st.randoms(use_true_random=False))
def test_what_is_committed_is_finished_to_the_last_record(offsets, chooser):
    """Acknowledged in any order, with any offsets missing between: never past an unfinished record, never short."""
    made, handed_out = consumer(), sorted(offsets)
    made._handed_out[PARTITION].extend(handed_out)
    finished = set()
    for offset in chooser.sample(handed_out, len(handed_out)):
        made._finished[PARTITION].add(offset)
        finished.add(offset)
        if (found := made._new_offset(PARTITION)) is not None:
            made._committed_offset[PARTITION] = found
        run = [at for place, at in enumerate(handed_out) if finished.issuperset(handed_out[: place + 1])]
        assert made._committed_offset[PARTITION] == (run[-1] + 1 if run else None)


class Fetcher:
    """A fetcher and its clock, on which only a pause takes time."""

    def __init__(self, pause_s=FETCH_PAUSE_S):
        self.now_s = 100.0
        self.begun_at_s = {}
        self.pauses_end = True
        keep_fetches_apart(self, pause_s, clock=lambda: self.now_s, sleep=self._sleep)

    async def _proc_fetch_request(self, assignment, node_id, request):
        self.begun_at_s[request] = self.now_s
        return request

    async def _sleep(self, seconds):
        if not self.pauses_end:
            await asyncio.Event().wait()
        self.now_s += seconds


@pytest.fixture
def fetcher():
    return Fetcher()


@pytest.mark.parametrize("pause_s", [FETCH_PAUSE_S, 0.05])
async def test_fetches_from_one_broker_begin_a_little_apart(pause_s):
    """Each returns what the fetcher's own returns. Those from another broker don't wait, nor does a late one."""
    fetcher = Fetcher(pause_s)
    fetches = ((1, "first"), (2, "other"), (1, "second"))
    assert [await fetcher._proc_fetch_request(None, *fetch) for fetch in fetches] == ["first", "other", "second"]
    fetcher.now_s = 200.0
    await fetcher._proc_fetch_request(None, 1, "late")
    assert fetcher.begun_at_s == {"first": 100.0, "other": 100.0, "second": 100.0 + pause_s, "late": 200.0}


async def test_a_fetch_that_is_closed_in_its_pause_answers(fetcher):
    """aiokafka's fetcher cancels its fetches and awaits each: an exception would end its close half way."""
    await fetcher._proc_fetch_request(None, 1, "first")
    fetcher.pauses_end = False
    second = asyncio.create_task(fetcher._proc_fetch_request(None, 1, "second"))
    await asyncio.sleep(0)
    second.cancel()
    assert await second is False
    assert "second" not in fetcher.begun_at_s
