"""Whose turn it is among several controllers: Kafka's group gives the one partition of a topic to one of them.

It only says who should try. Who may is decided by what servers promised. So each may try until the group says whose
turn it is, and again once the group is lost. One that hears no server leaves the group, because nobody else would get
the turn.
"""

from __future__ import annotations

import threading
from functools import partial

import structlog
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from schemaless.bus.client import AccountsHeard, open_client
from schemaless.bus.topics import ensure_topic
from schemaless.errors import SchemalessError

log = structlog.get_logger()

CONTROLLERS = "schemaless.controllers"
"""The name of the topic and of the group."""
_SESSION_S = 6.0
_AGAIN_S = 2.0
_POLL_S = 0.2


class Turn:
    """Joins the group in a thread of its own."""

    def __init__(self, bootstrap: str) -> None:
        self._bootstrap = bootstrap
        self._may_try = True
        self._is_able = True
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="turn", daemon=True)
        self._thread.start()

    @property
    def is_ours(self) -> bool:
        """True for the controller that has the partition, and for all that take part and don't hear the group."""
        return self._is_able and self._may_try

    def take_part(self, is_able: bool) -> None:
        """Leaves the group while the controller isn't able to do anything, and joins it again."""
        if is_able is not self._is_able:
            log.info("the controller takes part", takes_part=is_able)
        self._is_able = is_able

    def close(self) -> None:
        self._over.set()
        self._thread.join(_SESSION_S)

    def _run(self) -> None:
        while not self._over.wait(0.0 if self._is_able else _POLL_S):
            if not self._is_able:
                continue
            try:
                ensure_topic(self._bootstrap, CONTROLLERS, 1, timeout_s=_AGAIN_S)
                self._stay_in_group()
            except (SchemalessError, KafkaException) as error:
                log.info("no turn is given: every controller may try", why=str(error))
                self._over.wait(_AGAIN_S)

    def _stay_in_group(self) -> None:
        consumer = open_client(
            Consumer,
            self._bootstrap,
            {
                "group.id": CONTROLLERS,
                "session.timeout.ms": round(_SESSION_S * 1000),
                "heartbeat.interval.ms": 1000,
                "enable.auto.commit": False,
                "error_cb": partial(_leave_if_away, AccountsHeard(self._bootstrap)),
            },
        )
        try:
            consumer.subscribe([CONTROLLERS], on_assign=self._on_assign, on_lost=self._on_lost)
            while self._is_able and not self._over.is_set():
                message = consumer.poll(_POLL_S)
                if message is not None and (error := message.error()) is not None:
                    log.warning("the controllers' group", why=str(error))
        finally:
            self._may_try = True  # before the end of the membership, which takes seconds where a broker hangs
            consumer.close()

    def _on_assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        consumer.assign(partitions)
        consumer.pause(partitions)  # there is nothing to read
        self._may_try = bool(partitions)
        log.info("whose turn it is", ours=self._may_try)

    def _on_lost(self, _: Consumer, partitions: list[TopicPartition]) -> None:
        self._may_try = True
        log.warning("the controllers' group isn't heard: every controller may try")


def _leave_if_away(heard: AccountsHeard, error: KafkaError) -> None:
    """Ends the membership: the client tells when all brokers are gone, and not when they are back."""
    heard.note(error)
    if error.code() == KafkaError._ALL_BROKERS_DOWN:
        raise KafkaException(error)
