"""How far shards were published is known at once, however long the topics are, and by nothing that is over (I16)."""

import time
from contextlib import closing

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

from schemaless.bus.client import client_settings
from schemaless.bus.partition_log import progress_key, progress_value
from schemaless.bus.published import PublishedLocations
from schemaless.bus.topics import ensure_topic
from schemaless.errors import BusUnavailable
from schemaless.location import Location
from schemaless.position import Position
from schemaless.stack.local import running_kafka
from schemaless.topology import Datastore
from tests.waiting import LIMIT_S, until

ASKED_S = 0.3
RECORDS = 200_000


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    with running_kafka(tmp_path_factory.mktemp("published")) as started:
        yield started


@pytest.fixture
def datastore(broker, request):
    made = Datastore(f"p{abs(hash(request.node.name)) % 10**9}", 4, 2, ("a",))
    ensure_topic(broker[0], made.progress_topic, 2, timeout_s=LIMIT_S)
    return made


def publish(bootstrap, datastore, *locations):
    """Writes how far shards are, each a shard and its location, in one transaction."""
    queued_max = 2 * RECORDS  # a broker that has just started takes less than this process makes
    settings = {"transactional.id": datastore.name, "linger.ms": 5, "queue.buffering.max.messages": queued_max}
    producer = Producer(client_settings(bootstrap) | settings)
    producer.init_transactions(LIMIT_S)
    producer.begin_transaction()
    for shard, generation, added_id in locations:
        value = progress_value(Position(shard, generation, added_id), "", datastore.installation)
        producer.produce(datastore.progress_topic, value, progress_key(shard), datastore.partition(shard))
        producer.poll(0)
    producer.commit_transaction(LIMIT_S)


def known(published, datastore):
    """What it knows once it has read everything that there is."""
    (found,) = until(lambda: [published.of([datastore], ASKED_S)])
    return found


def knows(published, datastore, wanted):
    """Waits for the marker that ends a transaction, which comes after the producer's answer. Until then all is known
    that was so before.
    """
    before = None
    while (found := known(published, datastore)) != wanted:
        assert before in (None, found), f"{before} and then {found}"
        before = found
        time.sleep(0.01)


def test_what_comes_after_a_long_topic_is_known(broker, datastore):
    """Each time what was written last, and what was read before stays."""
    publish(broker[0], datastore, *((0, 1, n) for n in range(1, RECORDS + 1)), (3, 1, 7))
    with closing(PublishedLocations(broker[0])) as published:
        wanted = {(datastore.name, 0): Location(1, RECORDS), (datastore.name, 3): Location(1, 7)}
        knows(published, datastore, wanted)
        for added_id in range(8, 28):
            publish(broker[0], datastore, (3, 1, added_id))
            knows(published, datastore, wanted | {(datastore.name, 3): Location(1, added_id)})


def test_a_record_that_is_not_ours_hides_nothing(broker, datastore):
    """Neither what stands beside it in its topic, nor other datastores' topics: a master is compared with all of it."""
    publish(broker[0], datastore, (0, 1, 7))
    producer = Producer(client_settings(broker[0]))
    producer.produce(datastore.progress_topic, b"1", b"0", datastore.partition(0))
    assert producer.flush(60) == 0
    publish(broker[0], datastore, (1, 1, 3))
    other = Datastore(f"{datastore.name}other", 4, 2, ("a",))
    ensure_topic(broker[0], other.progress_topic, 2, timeout_s=LIMIT_S)
    publish(broker[0], other, (0, 1, 1))
    with closing(PublishedLocations(broker[0])) as published:
        knows(published, datastore, {(datastore.name, 0): Location(1, 7), (datastore.name, 1): Location(1, 3)})
        knows(published, other, {(other.name, 0): Location(1, 1)})


def test_what_was_not_read_yet_is_not_believed(broker, datastore):
    """The topic was read to no end, or is new."""
    publish(broker[0], datastore, *((0, 1, n) for n in range(1, RECORDS + 1)))
    with closing(PublishedLocations(broker[0])) as published:
        with pytest.raises(BusUnavailable, match="aren't read to their ends"):
            published.of([datastore], ASKED_S)
        late = Datastore(f"{datastore.name}late", 4, 2, ("a",))
        assert known(published, late) == {}
        ensure_topic(broker[0], late.progress_topic, 2, timeout_s=LIMIT_S)
        publish(broker[0], late, (1, 2, 3))
        knows(published, late, {(late.name, 1): Location(2, 3)})


def test_a_topic_that_was_made_anew_has_what_it_says_now(broker, datastore):
    publish(broker[0], datastore, *((shard, 1, n) for n in range(1, 50) for shard in range(4)))
    with closing(PublishedLocations(broker[0])) as published:
        assert len(known(published, datastore)) == 4
        admin = AdminClient(client_settings(broker[0]))
        admin.delete_topics([datastore.progress_topic])[datastore.progress_topic].result()
        until(lambda: datastore.progress_topic not in admin.list_topics(timeout=LIMIT_S).topics)
        ensure_topic(broker[0], datastore.progress_topic, 2, timeout_s=LIMIT_S)
        assert known(published, datastore) == {}
        publish(broker[0], datastore, (2, 1, 5))
        knows(published, datastore, {(datastore.name, 2): Location(1, 5)})


def test_while_kafka_is_away_nothing_is_known(broker, datastore):
    """The question ends, and what was read before is no answer. Afterwards it goes on."""
    bootstrap, server = broker
    publish(bootstrap, datastore, (0, 1, 1))
    with closing(PublishedLocations(bootstrap)) as published:
        known(published, datastore)
        server.kill()
        with pytest.raises(BusUnavailable):
            published.of([datastore], ASKED_S)
        server.start()
        publish(bootstrap, datastore, (0, 1, 2))
        knows(published, datastore, {(datastore.name, 0): Location(1, 2)})
