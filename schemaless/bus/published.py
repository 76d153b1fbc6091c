"""How far every shard was published, by the progress topics, which a thread follows from the start of its process.

It keeps one location a shard (I14). So an answer takes no longer where the topics are long.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import closing

import structlog
from confluent_kafka import IsolationLevel, KafkaException
from confluent_kafka.admin import AdminClient

from schemaless.bus.client import open_client, translate, translated
from schemaless.bus.partition_log import Place, ProgressEntry, ends_of, progress_entry
from schemaless.bus.reader import follow_topics
from schemaless.errors import BusUnavailable, Corrupt, SchemalessError
from schemaless.location import Location
from schemaless.names import is_progress_topic
from schemaless.record import Record
from schemaless.topology import Datastore

log = structlog.get_logger()

_AGAIN_S = 2.0
_END_S = 1.0


class PublishedLocations:
    """Follows the progress topics of all datastores. It may be asked from one thread."""

    def __init__(self, bootstrap: str) -> None:
        self._bootstrap = bootstrap
        self._admin = open_client(AdminClient, bootstrap)
        self._found: dict[tuple[str, int, str], Location] = {}  # by progress topic, shard and installation
        self._reached: dict[Place, int] = {}  # by topic and partition the offset that is read next
        self._is_another = False  # a topic was made anew
        self._moved = threading.Condition()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="published", daemon=True)
        self._thread.start()

    def of(self, datastores: Iterable[Datastore], timeout_s: float) -> dict[tuple[str, int], Location]:
        """Returns how far each shard was published, by datastore and shard, whatever topic it was published to.

        Raises BusUnavailable where Kafka doesn't say in time where the topics end, or they aren't read so far.
        """
        deadline = time.monotonic() + timeout_s
        known = {datastore.progress_topic: datastore for datastore in datastores}
        before = self._reached
        ends = self._ends(known, timeout_s)
        with self._moved:
            if any(before.get(place, 0) > end for place, end in ends.items()):
                self._is_another = True
                raise BusUnavailable("a progress topic was made anew, and is read again")
            if not self._moved.wait_for(lambda: self._is_at(ends), max(0.0, deadline - time.monotonic())):
                raise BusUnavailable(f"the progress topics aren't read to their ends within {timeout_s} s")
            return {
                (known[topic].name, shard): at
                for (topic, shard, installation), at in self._found.items()
                if topic in known and known[topic].installation == installation
            }

    def close(self) -> None:
        self._over.set()
        self._thread.join(_END_S)

    def _ends(self, topics: Iterable[str], timeout_s: float) -> dict[Place, int]:
        with translated("asking Kafka for its topics"):
            there = self._admin.list_topics(timeout=timeout_s).topics
        places = [(topic, partition) for topic in topics if topic in there for partition in there[topic].partitions]
        ends, errors = ends_of(self._admin, places, IsolationLevel.READ_COMMITTED, timeout_s)
        for (topic, partition), error in errors.items():
            raise translate(error, f"asking where {topic} [{partition}] ends")
        return ends

    def _is_at(self, ends: Mapping[Place, int]) -> bool:
        return all(self._reached.get(place, -1) >= end for place, end in ends.items())

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                self._follow()
            except (SchemalessError, KafkaException) as error:
                log.info("how far shards are published can't be read now", why=str(error))
                self._over.wait(_AGAIN_S)

    def _follow(self) -> None:
        """Begins anew: a topic may have been made anew, too."""
        with self._moved:
            self._found, self._reached, self._is_another = {}, {}, False
        with closing(follow_topics(self._bootstrap, is_progress_topic)) as following:
            for records, reached in following:
                entries = [(record.topic, entry) for record in records if (entry := _entry(record)) is not None]
                with self._moved:
                    self._found |= {
                        (topic, entry.shard, entry.installation): entry.position.location for topic, entry in entries
                    }
                    self._reached = self._reached | reached
                    self._moved.notify_all()
                if self._is_another or self._over.is_set():
                    return


def _entry(record: Record) -> ProgressEntry | None:
    """Returns None for a record that isn't ours: it hides nothing of other shards, or of what was published before."""
    try:
        return progress_entry(record)
    except Corrupt as error:
        log.warning("a record of progress is passed over", topic=record.topic, why=str(error))
        return None
