"""The two topics of a datastore: makes them, refuses ones that don't fit, and notices when they were deleted (I7, I8).

The cells topic keeps history for ever and takes the largest body. The progress topic is compacted and kept for ever, so
that a shard's progress outlives every consumer group. A topic that was deleted and made anew has another id.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import structlog
from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import ConfigResource
from confluent_kafka.admin._metadata import TopicMetadata
from confluent_kafka.admin._resource import ResourceType
from confluent_kafka.admin._topic import TopicDescription
from confluent_kafka.cimpl import NewTopic

from schemaless.bus.client import metadata_of, open_client, translate, translated
from schemaless.bus.ownership import claim_topics
from schemaless.cell import StoredCell
from schemaless.errors import BusUnavailable, Misconfigured, TopicMissing
from schemaless.location import INT64_MAX
from schemaless.topology import Datastore

log = structlog.get_logger()

_REPLICAS = 3
_POLL_S = 0.1
_ASKING = "asking Kafka for its topics"


def ensure_topics(bootstrap: str, datastore: Datastore, *, timeout_s: float = 10.0) -> None:
    """Makes the topics that are missing, claims them, and returns when both exist with at least the datastore's
    partitions.

    It waits for all leaders of a topic that it made, and for one of a topic that existed: a broker may be away, and the
    partitions of the others have to be tailed meanwhile.

    Logs unusual settings of a topic that exists. Raises Misconfigured for too few partitions and for settings that
    would lose cells or progress, AnotherInstallation for topics that aren't ours, BusUnavailable after `timeout_s` at
    the latest.
    """
    deadline = time.monotonic() + timeout_s
    admin = open_client(AdminClient, bootstrap)
    wanted = {datastore.topic: CELLS, datastore.progress_topic: PROGRESS}
    cluster = metadata_of(admin, bootstrap, _ASKING, timeout_s)
    missing = {topic: config for topic, config in wanted.items() if topic not in cluster.topics}
    if missing:
        _create(
            admin, missing, datastore.partitions, replicas=min(_REPLICAS, len(cluster.brokers)), timeout_s=timeout_s
        )
    while not _all_fit(metadata_of(admin, bootstrap, _ASKING, timeout_s).topics, wanted, missing, datastore):
        if time.monotonic() > deadline:
            raise BusUnavailable(f"topics of {datastore.name} have no leaders after {timeout_s} s")
        time.sleep(_POLL_S)
    for warning in _unusual(admin, bootstrap, datastore, timeout_s):
        log.warning("a topic has unusual settings", why=warning)
    claim_topics(bootstrap, datastore, timeout_s=timeout_s)


def ensure_topic(bootstrap: str, topic: str, partitions: int, *, timeout_s: float) -> None:
    """Makes a topic of cells that is missing, with settings as the cells topic has. Raises BusUnavailable."""
    admin = open_client(AdminClient, bootstrap)
    cluster = metadata_of(admin, bootstrap, _ASKING, timeout_s)
    if topic not in cluster.topics:
        replicas = min(_REPLICAS, len(cluster.brokers))
        _create(admin, {topic: CELLS}, partitions, replicas=replicas, timeout_s=timeout_s)


def record_bytes_max(bootstrap: str, datastore: Datastore, *, timeout_s: float) -> tuple[int, int]:
    """Returns the largest batch of records that the cells topic takes now, and the progress topic.

    Raises TopicMissing, BusUnavailable.
    """
    admin = open_client(AdminClient, bootstrap)
    cells, progress = (
        min(MESSAGE_BYTES_MAX, int(_settings(admin, topic, timeout_s).get("max.message.bytes", MESSAGE_BYTES_MAX)))
        for topic in (datastore.topic, datastore.progress_topic)
    )
    return cells, progress


def retention_ms(bootstrap: str, topic: str, *, timeout_s: float) -> int:
    """Returns for how long a topic keeps records, -1 where it keeps them for ever. Raises BusUnavailable."""
    return int(_settings(open_client(AdminClient, bootstrap), topic, timeout_s).get("retention.ms", "-1"))


def _unusual(admin: AdminClient, bootstrap: str, datastore: Datastore, timeout_s: float) -> list[str]:
    """Returns warnings about the settings of both topics. Raises Misconfigured, TopicMissing, BusUnavailable."""
    warnings = []
    checks = {datastore.topic: check_cells_settings, datastore.progress_topic: check_progress_settings}
    for found in _described(admin, bootstrap, list(checks), timeout_s=timeout_s):
        settings = _settings(admin, found.name, timeout_s)
        replicas = min((len(partition.replicas) for partition in found.partitions), default=1)
        warnings += checks[found.name](found.name, settings) + check_copies(found.name, settings, replicas)
    return warnings


def _settings(admin: AdminClient, topic: str, timeout_s: float) -> dict[str, str]:
    resource = ConfigResource(ResourceType.TOPIC, topic)
    asked = admin.describe_configs([resource], request_timeout=timeout_s)
    with translated(f"asking for the settings of topic {topic}"):
        return {name: entry.value or "" for name, entry in asked[resource].result().items()}


def _create(
    admin: AdminClient, missing: Mapping[str, Mapping[str, str]], partitions: int, *, replicas: int, timeout_s: float
) -> None:
    durable = {"min.insync.replicas": "2"} if replicas == _REPLICAS else {}
    topics = [NewTopic(topic, partitions, replicas, config={**config, **durable}) for topic, config in missing.items()]
    made = admin.create_topics(topics, operation_timeout=timeout_s, request_timeout=timeout_s)
    for topic, future in made.items():
        try:
            future.result()
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:  # another process was faster
                raise translate(error.args[0], f"creating topic {topic}") from error


def _all_fit(
    found: Mapping[str, TopicMetadata], wanted: Iterable[str], made: Container[str], datastore: Datastore
) -> bool:
    """Returns whether every topic exists and has leaders. Raises Misconfigured for another partition count."""
    for topic in wanted:
        partitions = found[topic].partitions if topic in found else {}
        led = [partition.leader >= 0 for partition in partitions.values()]
        if not any(led) or (topic in made and not all(led)):
            return False
        if len(partitions) < datastore.partitions:
            raise Misconfigured(
                f"topic {topic} has {len(partitions)} partitions, datastore {datastore.name} needs"
                f" {datastore.partitions}: delete the topic, or create the datastore with the topic's count"
            )
    return True


def raised_topics(counts: Mapping[str, int], datastore: Datastore) -> list[str]:
    """Says of each topic with more partitions than its datastore what that means, and what to do (I8).

    Whose shard is where stays right, because tailers choose the partition themselves.
    """
    what_to_do = {
        datastore.topic: "Nothing is published to the others. Clients that choose a partition by the row key now"
        " choose another one than its cells are in. To undo it, see docs/operating-the-log.md",
        datastore.progress_topic: "The others are not used. Delete that topic: tailers make it again, and rebuild it",
    }
    return [
        f"topic {topic} has {counts[topic]} partitions, and datastore {datastore.name} {datastore.partitions}: {what}"
        for topic, what in what_to_do.items()
        if counts.get(topic, 0) > datastore.partitions
    ]


def topic_ids(admin: AdminClient, bootstrap: str, topics: Sequence[str], *, timeout_s: float) -> list[str]:
    """Returns the id of each topic. Raises TopicMissing when one doesn't exist, BusUnavailable."""
    return [str(found.topic_id) for found in _described(admin, bootstrap, topics, timeout_s=timeout_s)]


def _described(
    admin: AdminClient, bootstrap: str, topics: Sequence[str], *, timeout_s: float
) -> list[TopicDescription]:
    asked = admin.describe_topics(TopicCollection(list(topics)), request_timeout=timeout_s)
    with translated(f"asking Kafka at {bootstrap} which topics {' and '.join(topics)} are"):
        return [asked[topic].result() for topic in topics]


def describe_topic(bootstrap: str, topic: str, *, timeout_s: float) -> TopicDescription:
    """Returns what one topic is: its id and its partitions. Raises TopicMissing, BusUnavailable."""
    return _described(open_client(AdminClient, bootstrap), bootstrap, [topic], timeout_s=timeout_s)[0]


def topic_id(bootstrap: str, topic: str, *, timeout_s: float) -> str:
    """Returns the id of one topic. Raises TopicMissing, BusUnavailable."""
    return str(describe_topic(bootstrap, topic, timeout_s=timeout_s).topic_id)


SETTINGS_EVERY_S = 10.0


class TopicsWatch:
    """Notices that the topics of a datastore were deleted or made anew since it was created, or got other settings, and
    counts their partitions.

    One thread at a time.
    """

    def __init__(self, bootstrap: str, datastore: Datastore, *, every_s: float, timeout_s: float) -> None:
        self._admin = open_client(AdminClient, bootstrap)
        self._bootstrap = bootstrap
        self._datastore = datastore
        self._unusual = _unusual(self._admin, bootstrap, datastore, timeout_s)
        self._verified_at = time.monotonic()
        self._every_s = every_s
        self._timeout_s = timeout_s
        self._asked_at = time.monotonic()
        self.counts: dict[str, int] = {}
        """How many partitions each topic has, as its last answer says."""
        self._ids = self._ask()
        self.answered = 0
        """How many questions of `changed` the broker has answered."""

    def changed(self) -> bool:
        """Returns whether they were, and False while the broker is unreachable. It asks once in `every_s`."""
        if time.monotonic() - self._asked_at < self._every_s:
            return False
        self._asked_at = time.monotonic()
        try:
            changed = self._ask() != self._ids
        except TopicMissing:
            changed = True
        except BusUnavailable:
            return False
        self.answered += 1
        return changed

    def verify_settings(self) -> None:
        """Asks for the settings now and then, and logs what is new. Raises Misconfigured where they would lose cells or
        progress: who opens the topics now is refused, too. A broker that is unreachable says nothing.
        """
        if time.monotonic() - self._verified_at < SETTINGS_EVERY_S:
            return
        self._verified_at = time.monotonic()
        with suppress(TopicMissing, BusUnavailable):
            before = self._unusual
            self._unusual = _unusual(self._admin, self._bootstrap, self._datastore, self._timeout_s)
            for warning in set(self._unusual) - set(before):
                log.warning("a topic has unusual settings", why=warning)

    def _ask(self) -> list[str]:
        topics = (self._datastore.topic, self._datastore.progress_topic)
        found = _described(self._admin, self._bootstrap, topics, timeout_s=self._timeout_s)
        self.counts = {topic.name: len(topic.partitions) for topic in found}
        return [str(topic.topic_id) for topic in found]


# The settings of the two topics of a datastore, and which settings of existing topics are refused (I7). Pure.
#
# A setting is refused if it would lose progress or stop a partition for good. One that only shortens the topic's
# history, or may refuse cells of a master whose clock is ahead, is logged: MySQL keeps all history, and less may be
# wanted here.

MESSAGE_BYTES_MAX = 4 << 20
"""Largest size of one record. A body has at most 1 MiB as sent, and may grow in its stored form."""

_ENVELOPE_BYTES = 400  # of batch, record, key, headers and the other fields, without the column's name

CELLS: Mapping[str, str] = {
    "cleanup.policy": "delete",
    "retention.ms": "-1",
    "retention.bytes": "-1",
    "max.message.bytes": str(MESSAGE_BYTES_MAX),
    # Timestamps are created_at: a master's clock may be ahead of the broker's by any amount.
    "message.timestamp.after.max.ms": str(INT64_MAX),
}
PROGRESS: Mapping[str, str] = {
    "cleanup.policy": "compact",
    "retention.ms": "-1",
    # Read from its beginning whenever a partition changes hands, so old segments are compacted early.
    "segment.bytes": str(16 << 20),
    "segment.ms": str(3_600_000),
    "min.cleanable.dirty.ratio": "0.1",
}


@dataclass(frozen=True, slots=True)
class _Rule:
    setting: str
    fits: Callable[[str], bool]
    refused: bool
    otherwise: str


def _is(*wanted: str) -> Callable[[str], bool]:
    return lambda value: value in wanted


def _at_least(number: int) -> Callable[[str], bool]:
    return lambda value: int(value) >= number


_YEAR_MS = 365 * 86_400_000
_RULES_OF_CELLS = (
    _Rule("cleanup.policy", _is("delete", ""), True, "older versions would vanish from between others"),
    _Rule("max.message.bytes", _at_least(MESSAGE_BYTES_MAX), False, "a cell that is larger holds up its shard"),
    _Rule("retention.ms", _is("-1"), False, "the topic forgets cells; older ones are in MySQL only"),
    _Rule("retention.bytes", _is("-1"), False, "the topic forgets cells; older ones are in MySQL only"),
    _Rule("message.timestamp.after.max.ms", _at_least(_YEAR_MS), False, "a master whose clock is ahead stops shards"),
    _Rule("message.timestamp.before.max.ms", _at_least(_YEAR_MS), False, "old cells can't be published"),
    _Rule("message.timestamp.type", _is("CreateTime"), False, "a record's timestamp is not its cell's created_at"),
)
_RULES_OF_PROGRESS = (_Rule("cleanup.policy", _is("compact"), True, "progress would expire, or be read without end"),)


def record_bytes(cell: StoredCell) -> int:
    """Returns what the record of a cell takes at most, as `max.message.bytes` counts it."""
    text = cell.column_name if cell.cause is None else cell.column_name * 2 + cell.cause
    return len(cell.body) + _ENVELOPE_BYTES + 8 * len(text)


def check_cells_settings(topic: str, found: Mapping[str, str]) -> list[str]:
    """Returns warnings about the settings of a cells topic. Raises Misconfigured for one that can't be used."""
    return _check(topic, found, _RULES_OF_CELLS, CELLS)


def check_progress_settings(topic: str, found: Mapping[str, str]) -> list[str]:
    """Returns warnings about the settings of a progress topic. Raises Misconfigured for one that can't be used."""
    return _check(topic, found, _RULES_OF_PROGRESS, PROGRESS)


def check_copies(topic: str, found: Mapping[str, str], replicas: int) -> list[str]:
    """Returns a warning where a topic has several replicas, and one of them is enough for a commit."""
    least = found.get("min.insync.replicas", "2")
    if replicas < 2 or int(least) > 1:
        return []
    lost = "what one broker alone has is lost with it, and comes a second time once a tailer opens its log again"
    return [f"topic {topic} has {replicas} replicas and min.insync.replicas={least}: {lost}"]


def _check(topic: str, found: Mapping[str, str], rules: tuple[_Rule, ...], made_with: Mapping[str, str]) -> list[str]:
    # A setting that the broker doesn't know breaks no rule.
    broken = [rule for rule in rules if rule.setting in found and not rule.fits(found[rule.setting])]
    warnings = [
        f"topic {topic} has {rule.setting}={found[rule.setting]}: {rule.otherwise}"
        + (f"; it is made with {made_with[rule.setting]}" if rule.setting in made_with else "")
        for rule in broken
    ]
    for rule, text in zip(broken, warnings, strict=True):
        if rule.refused:
            raise Misconfigured(f"{text}: alter the topic")
    return warnings
