"""FaustTransport: a member of a group receives the raw records of its partitions, in order.

The corrected app comes first. With it, the records of a partition that one fetch brought are one event. The agent gives
each to the receiver, which takes it at once. No exception leaves the agent: CrashingSupervisor ends the process.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import faust
import structlog
from aiokafka.conn import create_conn
from aiokafka.errors import (
    AuthenticationFailedError,
    GroupAuthorizationFailedError,
    InconsistentGroupProtocolError,
    KafkaConnectionError,
    KafkaError,
    SaslAuthenticationFailed,
)
from aiokafka.structs import OffsetAndMetadata
from faust.transport.drivers import aiokafka as driver
from faust.transport.utils import DefaultSchedulingStrategy
from faust.types import TP
from faust.types.tuples import ConsumerMessage
from mode import Service
from mode.supervisors import CrashingSupervisor

from schemaless.bus.client import METADATA_AGE_MAX_MS
from schemaless.bus.transport import Receiver, refused
from schemaless.errors import BusRefuses, BusUnavailable, SchemalessError
from schemaless.record import Record
from schemaless.runtime.kafka_access import (
    NO_RIGHT_ON_GROUP,
    NO_RIGHT_ON_TOPIC,
    KafkaAccess,
    KafkaAccount,
    access_of,
    keep_account,
    note_refusal,
    require_account,
    require_certificate_of,
)
from schemaless.runtime.logs import limit_repeats

# A Faust app whose reading and acknowledging are corrected for transactional topics. It fits one exact release.
#
# Measured on faust-streaming 0.15.3. `tests/integration/bus/` (test_transports.py, test_faust_cells.py) holds it to:
#
# - Reading is `read_committed`, which Faust offers only together with exactly_once.
# - The committed offset is the one behind the longest run of acknowledged records, whatever offsets lie between them.
#   Faust's own book-keeping stops at every transaction marker, and skips one record now and then.
# - Fetches begin a little apart, so that records which come soon after one another are one fetch.
#
# docs/triggers.md says what each setting prevents.

SESSION_TIMEOUT_S = 10.0  # how long the partitions of a killed member wait
_FAUST_EVENTS_MAX = 1000  # in Faust's own queue, with the next one what bounds memory
_FETCH_BYTES = 1 << 20  # of one partition
FETCH_PAUSE_S = 0.012  # else 200 records/s are 200 fetches, and as many rounds of Faust, transactions and commits


class _ReadCommittedThread(driver.AIOKafkaConsumerThread):  # type: ignore[misc]  # Faust has no types for mypy
    heartbeats: Heartbeats | None = None

    def _create_worker_consumer(self, transport: Any) -> Any:
        consumer = super()._create_worker_consumer(transport)
        consumer._isolation_level = "read_committed"
        _keep_account(self.app, consumer._client)
        return consumer

    async def on_start(self) -> None:
        await super().on_start()
        consumer = self._ensure_consumer()
        keep_fetches_apart(consumer._fetcher, self.app.fetch_pause_s)
        self.heartbeats = Heartbeats(consumer._coordinator)

    async def stop(self) -> None:
        """Waits for the thread beside the event loop. Faust blocks the loop, which the thread may need to end."""
        if self._started.is_set():
            await Service.stop(self)
            if self._thread is not None:
                await asyncio.to_thread(self._thread.stop)

    @property
    def refusal(self) -> SchemalessError | None:
        """Returns why this process gets no partitions, if Kafka has said so. Faust and aiokafka only log it."""
        if self._consumer is None or self.heartbeats is None:
            return None
        if denied := self._consumer._client.cluster.unauthorized_topics & self._consumer.subscription():
            return BusRefuses(f"reading topic {min(denied)}: {NO_RIGHT_ON_TOPIC}")
        group, error = self._consumer._group_id, self.heartbeats.refusal
        if isinstance(error, InconsistentGroupProtocolError):
            return refused(group, error)
        if isinstance(error, GroupAuthorizationFailedError):
            return BusRefuses(f"joining group {group}: {NO_RIGHT_ON_GROUP}")
        return None

    def revive(self) -> None:
        """Starts aiokafka's task that knows the brokers again, if it has died. Any thread may call it.

        uvloop raises a RuntimeError for a connection that was just closed, which aiokafka 0.14.0 doesn't expect. Nobody
        notices, and the group's coordinator is never found again.
        """
        if self._consumer is not None and (task := self._consumer._client._sync_task) is not None and task.done():
            self.thread_loop.call_soon_threadsafe(self._revive)

    def _revive(self) -> None:
        client = self._ensure_consumer()._client
        if client._sync_task is not None and client._sync_task.done() and not client._sync_task.cancelled():
            log.warning(
                "aiokafka knows the brokers no longer, and is told to look again",
                why=repr(client._sync_task.exception()),
            )
            client._sync_task = asyncio.ensure_future(client._md_synchronizer())

    async def confirm(self, partitions: Iterable[TP]) -> None:
        """Commits where reading is. The coordinator answers only a member of the present generation of the group.

        Raises what aiokafka raises.
        """
        await self.call_thread(self._confirm, list(partitions))

    async def _confirm(self, partitions: Sequence[TP]) -> None:
        consumer = self._ensure_consumer()
        found = {driver.ensure_aiokafka_TP(tp): await consumer.position(tp) for tp in partitions}
        await consumer.commit({tp: OffsetAndMetadata(offset, "") for tp, offset in found.items()})


class Heartbeats:
    """When the coordinator last answered a heartbeat of aiokafka's `coordinator`: it is still our group then.

    aiokafka tells nobody when the answers stop.
    """

    def __init__(self, coordinator: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._coordinator = coordinator
        self._beat = coordinator._do_heartbeat
        self._answered_at = clock()
        coordinator._do_heartbeat = self._beat_and_note

    @property
    def age_s(self) -> float:
        """Seconds since the last heartbeat that was answered was sent, or since the last rebalance."""
        return self._clock() - self._answered_at

    @property
    def refusal(self) -> BaseException | None:
        """Returns the error that aiokafka keeps for the next reader. Faust reads only once it has partitions."""
        error: BaseException | None = self._coordinator._pending_exception
        return error

    def joined(self) -> tuple[str, int]:
        """Takes a rebalance as an answer. Returns the member's id and the group's generation."""
        self._answered_at = self._clock()
        return self._coordinator.member_id, self._coordinator.generation

    async def _beat_and_note(self) -> Any:
        sent_at = self._clock()
        answered = await self._beat()
        if answered:
            self._answered_at = sent_at
        return answered


def keep_fetches_apart(
    fetcher: Any,
    pause_s: float = FETCH_PAUSE_S,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Lets the fetches of aiokafka's `fetcher` from one broker begin at least `pause_s` apart.

    A fetch that waits at the broker for the next record began long ago, so a record that comes alone comes at once.
    """
    fetch = fetcher._proc_fetch_request
    begun: dict[int, float] = {}

    async def fetch_later(assignment: Any, node_id: int, request: Any) -> Any:
        wait_s = begun.get(node_id, 0.0) + pause_s - clock()
        if wait_s > 0:
            try:
                await sleep(wait_s)
            except asyncio.CancelledError:  # by the fetcher's close, which expects an answer and no error
                return False
        begun[node_id] = clock()
        return await fetch(assignment, node_id, request)

    fetcher._proc_fetch_request = fetch_later


class CorrectedConsumer(driver.Consumer):  # type: ignore[misc]
    """Remembers the records of each partition that were handed out and not committed, and which were acknowledged."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._handed_out: dict[TP, deque[int]] = defaultdict(deque)
        self._finished: dict[TP, set[int]] = defaultdict(set)

    def ack(self, message: Any) -> bool:
        tp = message.tp
        self._finished[tp].add(message.offset)
        acked = bool(super().ack(message))
        self._acked[tp]  # Faust asks only those partitions for an offset that have an entry here
        return acked

    def _new_consumer_thread(self) -> _ReadCommittedThread:
        return _ReadCommittedThread(self, loop=self.loop, beacon=self.beacon)

    def _to_message(self, tp: TP, record: Any) -> ConsumerMessage:
        message = super()._to_message(tp, record)
        handed_out = self._handed_out[tp]
        if handed_out and handed_out[-1] >= message.offset:  # reading went back: it begins anew
            handed_out.clear()
            self._finished[tp].clear()
        handed_out.append(message.offset)
        return message

    async def on_partitions_revoked(self, revoked: set[TP]) -> None:
        await super().on_partitions_revoked(revoked)
        for tp in revoked:
            self._handed_out.pop(tp, None)
            self._finished.pop(tp, None)

    async def _add_gap(self, tp: TP, offset_from: int, offset_to: int) -> None:
        """Offsets without a record (transaction markers, aborted ones) need no book-keeping."""

    def verify_event_path(self, now: float, tp: TP) -> None:
        """Faust's own watch calls every idle partition stuck."""

    def _new_offset(self, tp: TP) -> int | None:
        handed_out, finished = self._handed_out[tp], self._finished[tp]
        newest = None
        while handed_out and handed_out[0] in finished:
            newest = handed_out.popleft()
            finished.discard(newest)
        self._acked[tp].clear()
        self._acked_index[tp].clear()
        committed = self._committed_offset[tp]
        return None if newest is None or (committed is not None and newest < committed) else newest + 1


class _KeptFaustProducer(driver.Producer):  # type: ignore[misc]
    def _new_producer(self, transactional_id: str | None = None) -> Any:
        producer = super()._new_producer(transactional_id)
        _keep_account(self.app, producer.client)
        return producer


class CorrectedTransport(driver.Transport):  # type: ignore[misc]
    Consumer = CorrectedConsumer
    Producer = _KeptFaustProducer


class CorrectedAgent(faust.Agent):  # type: ignore[misc]
    async def _execute_actor(self, coro: Awaitable[Any], aref: Any) -> None:
        """Faust forgets an agent that ends with what is no Exception, as GeneratorExit, and its partitions stand."""

        async def as_exception() -> None:
            try:
                await coro
            except GeneratorExit as error:
                raise RuntimeError(f"the agent {self.name} raised GeneratorExit") from error

        await super()._execute_actor(as_exception(), aref)


class CorrectedApp(faust.App):  # type: ignore[misc]
    fetch_pause_s = FETCH_PAUSE_S

    async def on_start(self) -> None:
        await self.require_let_in()
        await super().on_start()

    async def require_let_in(self) -> None:
        """Raises BusRefuses where a broker refuses the account. Faust would only say that it finds no broker."""
        auth = driver.credentials_to_aiokafka_auth(self.conf.broker_credentials)
        for url in self.conf.broker:
            address = f"{url.host}:{url.port}"
            if "sasl_mechanism" not in auth:
                await asyncio.to_thread(require_account, address, auth.get("ssl_context"))
                continue
            with suppress(OSError, KafkaConnectionError):  # a broker that can't be reached now may come
                try:
                    connection = await create_conn(url.host, url.port, **auth)
                except (AuthenticationFailedError, SaslAuthenticationFailed) as error:
                    raise BusRefuses(note_refusal(address, auth["sasl_plain_username"])) from error
                connection.close()

    @Service.task  # type: ignore[untyped-decorator]
    async def _end_where_refused(self) -> None:
        """Ends the app with a sentence where it would wait for its partitions for ever."""
        async for _ in self.itertimer(_LOOK_PAUSE_S):
            if (refusal := self.consumer._thread.refusal) is not None:
                raise refusal

    def _create_directories(self) -> None:
        """Makes Faust's folders only for tables that are kept in files. Ours are in memory, so it stays empty."""
        if self.conf.store.scheme != "memory":
            super()._create_directories()

    def _new_transport(self) -> Any:
        return CorrectedTransport(self.conf.broker_consumer, self)


def settings_of(bootstrap: str, session_timeout_s: float = SESSION_TIMEOUT_S) -> dict[str, Any]:
    """Returns the settings of an app that neither loses events nor leaves its group for ever.

    Raises as `client_settings` does.
    """
    return {
        **_credentials(access_of(bootstrap), bootstrap),
        "broker": [f"kafka://{host}" for host in bootstrap.split(",")],
        "processing_guarantee": "at_least_once",
        "store": "memory://",
        "web_enabled": False,
        "web_bind": "127.0.0.1",
        "topic_allow_declare": False,
        "topic_disable_leader": True,
        "consumer_auto_offset_reset": "earliest",
        "consumer_max_fetch_size": _FETCH_BYTES,
        "consumer_metadata_max_age_ms": METADATA_AGE_MAX_MS,
        "producer_metadata_max_age_ms": METADATA_AGE_MAX_MS,
        "broker_commit_interval": 1.0,
        "broker_max_poll_interval": 86_400.0,  # an idle or waiting member must not leave the group
        "broker_session_timeout": session_timeout_s,
        "broker_heartbeat_interval": session_timeout_s * 0.3,
        "stream_buffer_maxsize": _FAUST_EVENTS_MAX,
        "stream_wait_empty": True,
        "agent_supervisor": CrashingSupervisor,
        "Agent": CorrectedAgent,
    }


def _credentials(access: KafkaAccess, bootstrap: str) -> dict[str, Any]:
    account, context = access.account, None
    if access.tls is not None:
        require_certificate_of(bootstrap, access.tls)
        context = access.tls.context()
    if account is not None:
        return {"broker_credentials": AccountCredentials(account, access.account_file, context)}
    return {} if context is None else {"broker_credentials": faust.SSLCredentials(context)}


class AccountCredentials(faust.SASLCredentials):  # type: ignore[misc]
    """An account of Kafka. It and the clients that keep it take up the next one of its file, if it is from one."""

    def __init__(self, account: KafkaAccount, file: Path | None, context: ssl.SSLContext | None) -> None:
        super().__init__(mechanism=account.mechanism, ssl_context=context)
        self._file = file
        self.take(account)
        self.keep(self, AccountCredentials.take)

    def take(self, account: KafkaAccount) -> None:
        self._account = account
        self.username, self.password = account.user, account.password

    def keep(self, client: Any, take: Callable[[Any, KafkaAccount], None]) -> None:
        if self._file is not None:
            keep_account(self._file, client, self._account, take)


def _keep_account(app: faust.App, client: Any) -> None:
    """Lets a client of aiokafka, which reads these names for each connection, take up the app's next account."""

    def take(client: Any, account: KafkaAccount) -> None:
        client._sasl_plain_username, client._sasl_plain_password = account.user, account.password

    if isinstance(credentials := app.conf.broker_credentials, AccountCredentials):
        credentials.keep(client, take)


def faust_app(name: str, kafka: str, **settings: Any) -> faust.App:
    """Returns an app for agents on the cells topic. `name` is its consumer group. Faust's `settings` override ours.

    An agent that raises ends the process, so run it under a supervisor. `cells_topic` says how an agent acknowledges.
    With `web_enabled=True` Faust's web server listens, on loopback if `web_bind` doesn't say otherwise. Repeated log
    lines of Faust and aiokafka are counted, and written ever more seldom.
    """
    limit_repeats(["aiokafka", "faust", "mode"])
    app = CorrectedApp(name, **(settings_of(kafka) | settings))
    app.boot_strategy.enable_web = bool(settings.get("web_enabled"))  # Faust's command sets web_enabled by itself
    return app


log = structlog.get_logger()

_BUFFERED_EVENTS_MAX = 16  # in Faust's own queue: with a fetch's size, what bounds memory
_START_TIMEOUT_S = 60.0
_LOOK_PAUSE_S = 1.0
_STOP_TIMEOUT_S = 5.0


class _Batches(DefaultSchedulingStrategy):  # type: ignore[misc]  # Faust has no types for mypy
    """Yields all records that a fetch brought for a partition at once. Faust alternates between fetches."""

    def iterate(self, records: Mapping[TP, list[Any]]) -> Iterator[tuple[TP, list[Any]]]:
        return ((tp, found) for tp, found in records.items() if found)


class _BatchConsumer(CorrectedConsumer):
    def _to_message(self, tp: TP, record: Any) -> ConsumerMessage:
        """Makes one message of a batch, with the offset of its last record."""
        message = super()._to_message(tp, record[-1])
        message.key = None
        message.value = tuple([_record(found) for found in record])
        return message


class _BatchTransport(CorrectedTransport):
    Consumer = _BatchConsumer


class _App(CorrectedApp):
    def _new_transport(self) -> _BatchTransport:
        return _BatchTransport(self.conf.broker_consumer, self)

    def _create_directories(self) -> None:
        """Makes no directories: they are for tables, and there are none."""


class FaustTransport:
    """Connects one topic and one group with one receiver. `run` ends only by being cancelled or by raising."""

    def __init__(
        self,
        bootstrap: str,
        group: str,
        topic: str,
        receiver: Receiver,
        *,
        session_timeout_s: float = SESSION_TIMEOUT_S,
        read_pause_s: float | None = None,
    ) -> None:
        self.refusal: str | None = None
        self._receiver = receiver
        self._session_timeout_s = session_timeout_s
        self._joined: tuple[str, int] | None = None
        self._revoked_partitions: set[int] = set()
        self._topic = topic
        self._app = _app(bootstrap, group, session_timeout_s)
        self._app.fetch_pause_s = FETCH_PAUSE_S if read_pause_s is None else read_pause_s
        channel = self._app.topic(topic, key_type=bytes, value_type=bytes, key_serializer="raw", value_serializer="raw")
        self._app.agent(channel, concurrency=1, supervisor_strategy=CrashingSupervisor)(self._receive)
        self._app.on_partitions_assigned.connect(self._assigned, weak=False)
        self._app.on_partitions_revoked.connect(self._revoked, weak=False)

    async def run(self) -> None:
        """Runs until cancelled. Raises BusUnavailable when Faust gives up, which has to end the process."""
        self._app.finalize()
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await self._until_done(self._app.maybe_start())
            await self._until_done(self._app.wait_until_stopped())
            reason = self._app.crash_reason
            if isinstance(reason, SchemalessError):  # why the group or Kafka refuses us
                raise reason
            raise BusUnavailable(f"Faust stopped: {reason!r}") from reason
        except TimeoutError as error:
            raise BusUnavailable(f"group {self._app.conf.id}: no start within {_START_TIMEOUT_S} s") from error
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._app.conf.stream_wait_empty = False  # what failed will never be acknowledged
            if isinstance(error, KafkaError):
                raise BusUnavailable(f"group {self._app.conf.id}: {error}") from error
            raise
        finally:
            await self._stop()

    async def _stop(self) -> None:
        """Leaves the group and commits. If that takes too long, the end of the process cuts it off.

        Faust swallows cancellations while it stops, so a timeout that cancels it would bound nothing.
        """
        stopping = asyncio.ensure_future(self._app.stop())
        await asyncio.wait({stopping}, timeout=_STOP_TIMEOUT_S)
        if stopping.done():
            stopping.result()
        else:
            log.warning("Faust did not stop in time", group=self._app.conf.id, seconds=_STOP_TIMEOUT_S)

    async def _until_done(self, waiting: Awaitable[None]) -> None:
        """Waits for Faust, keeps its client alive, and asks why Kafka doesn't answer where it doesn't."""
        task = asyncio.ensure_future(waiting)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=_LOOK_PAUSE_S)
                self._thread.revive()
                if not self.is_alive():
                    await self._ask_if_refused()
            task.result()
        finally:
            task.cancel()

    def is_alive(self) -> bool:
        heartbeats = self._thread.heartbeats
        return heartbeats is not None and heartbeats.age_s < self._session_timeout_s

    @property
    def kafka_answers(self) -> bool:
        return self.is_alive()

    async def _ask_if_refused(self) -> None:
        """Asks beside Faust, which tells nobody why it has no connection."""
        if not isinstance(self._app.conf.broker_credentials, AccountCredentials):
            return
        try:
            async with asyncio.timeout(_LOOK_PAUSE_S):
                await self._app.require_let_in()
        except BusRefuses as error:
            self.refusal = str(error)
        except TimeoutError:
            self.refusal = None
        else:
            self.refusal = None

    async def confirm(self, partitions: Iterable[int]) -> None:
        try:
            async with asyncio.timeout(self._session_timeout_s):
                await self._thread.confirm([TP(self._topic, partition) for partition in partitions])
        except (KafkaError, TimeoutError) as error:
            raise BusUnavailable(f"group {self._app.conf.id}: {error!r}") from error

    @property
    def _thread(self) -> Any:
        return self._app.consumer._thread

    async def _receive(self, stream: Any) -> None:
        async for event in stream.noack().events():
            self._receiver.take(event.message.partition, event.value)
            event.ack()  # nothing rests on it: what was not finished is read from the log

    async def _assigned(self, app: Any, assigned: Iterable[TP], **_: Any) -> None:
        partitions = sorted(tp.partition for tp in assigned if tp.topic == self._topic)
        before, self._joined = self._joined, self._thread.heartbeats.joined() if self._thread.heartbeats else None
        # The next generation of the same member: between the two nobody else had the partition (eager assignment).
        directly_after = before and self._joined == (before[0], before[1] + 1)
        kept = sorted(self._revoked_partitions.intersection(partitions)) if directly_after else []
        self._revoked_partitions = set()
        log.info("partitions assigned", group=self._app.conf.id, partitions=partitions, kept=len(kept))
        await self._receiver.assigned(partitions, kept)

    async def _revoked(self, app: Any, revoked: Iterable[TP], **_: Any) -> None:
        partitions = {tp.partition for tp in revoked if tp.topic == self._topic}
        self._revoked_partitions |= partitions
        await self._receiver.revoked(partitions)


def _app(bootstrap: str, group: str, session_timeout_s: float) -> _App:
    ours = {
        "consumer_auto_offset_reset": "latest",  # history is read from MySQL, up to where reading the topic begins
        "ConsumerScheduler": _Batches,
        "stream_buffer_maxsize": _BUFFERED_EVENTS_MAX,
    }
    return _App(group, **(settings_of(bootstrap, session_timeout_s) | ours))


def _record(found: Any) -> Record:
    return Record(
        topic=found.topic,
        partition=found.partition,
        offset=found.offset,
        timestamp_ms=found.timestamp or 0,
        key=found.key,
        value=found.value or b"",
        headers={name: value or b"" for name, value in found.headers},
    )
