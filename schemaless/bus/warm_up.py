"""Warms a broker that was just started. Its JVM compiles what transactions need before anybody waits for one.

Without this the first cells after a start would be late: the first transactions of a broker take many times as long as
later ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from schemaless.bus.client import client_settings, translated

TOPIC = "schemaless-warm-up"
TRANSACTIONS = 500
_PARTITIONS = 4
_STEP_TIMEOUT_S = 5.0


def warm_up(bootstrap: str, *, at_most_s: float, clock: Callable[[], float] = time.monotonic) -> int:
    """Commits small transactions to a topic of its own and reads them. Returns how many, and deletes the topic.

    It begins no transaction after `at_most_s`, and none after the 500th. Raises BusUnavailable when a step isn't done
    within 5 s, and another SchemalessError when the broker refuses one.
    """
    settings = client_settings(bootstrap)
    admin = AdminClient(settings)
    deadline = clock() + at_most_s
    with translated("warming the broker"):
        new = NewTopic(TOPIC, _PARTITIONS, 1)
        made = admin.create_topics([new], operation_timeout=_STEP_TIMEOUT_S, request_timeout=_STEP_TIMEOUT_S)
        try:
            made[TOPIC].result()
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:  # left by a start that was killed
                raise
        try:
            return _transactions(settings, lambda: clock() < deadline)
        finally:
            admin.delete_topics([TOPIC], request_timeout=_STEP_TIMEOUT_S)[TOPIC].result()


def _transactions(settings: dict[str, object], time_is_left: Callable[[], bool]) -> int:
    # In turn: a producer whose commit was just acknowledged can't begin for a few milliseconds.
    producers = [
        Producer({**settings, "transactional.id": f"{TOPIC}-{number}", "linger.ms": 0}) for number in range(_PARTITIONS)
    ]
    for producer in producers:
        producer.init_transactions(_STEP_TIMEOUT_S)
    reader = Consumer({**settings, "group.id": TOPIC, "enable.auto.commit": False, "isolation.level": "read_committed"})
    committed = 0
    try:
        reader.assign([TopicPartition(TOPIC, number, 0) for number in range(_PARTITIONS)])
        while committed < TRANSACTIONS and time_is_left():
            partition = committed % _PARTITIONS
            producers[partition].begin_transaction()
            producers[partition].produce(TOPIC, bytes(200), bytes(36), partition)
            producers[partition].commit_transaction(_STEP_TIMEOUT_S)
            committed += 1
            reader.poll(0)
    finally:
        reader.close()
    return committed
