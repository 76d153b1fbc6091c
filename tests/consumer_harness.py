"""What the tests of consumers share: real indexer and trigger processes, and waiting for their checkpoints."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from schemaless.config import ConsumerSettings, IndexerSettings, ProbeSettings
from schemaless.storage import checkpoint_table, shard_head
from schemaless.storage.pymysql_driver import SyncStorage
from schemaless.topology import Datastore
from tests.environment import environment_of
from tests.waiting import until


class ConsumerProcess:
    """`python -m MODULE …` with the settings of a consumer, and a short session: others soon have what it left."""

    def __init__(
        self,
        arguments: list[str],
        settings: Mapping[str, object],
        environment: Mapping[str, str],
        stdout: int | None = None,
    ) -> None:
        self._command = [sys.executable, "-m", *arguments]
        self._stdout = stdout
        kind = {"indexer": IndexerSettings, "consumers.probe": ProbeSettings}.get(arguments[0], ConsumerSettings)
        named = dict(settings) if kind is ProbeSettings else {"session_timeout_s": 3.0, **settings}
        if kind is not IndexerSettings:
            named.pop("datastores", None)  # a program gets its datastore as an argument
        own = environment_of(kind, named)
        self._environment = {**os.environ, **own, **environment}
        self.process = self._start()

    def _start(self) -> subprocess.Popen:
        return subprocess.Popen(self._command, env=self._environment, start_new_session=True, stdout=self._stdout)

    def kill_and_restart(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process = self._start()

    def stop(self, timeout_s: float = 40.0) -> int:
        """SIGTERM; its exit status. A process that hangs while it stops cuts itself off after 20 s, and says where."""
        self.process.terminate()
        return self.process.wait(timeout_s)


@contextmanager
def running_consumer(
    arguments: list[str],
    settings: Mapping[str, object],
    environment: Mapping[str, str] | None = None,
    stdout: int | None = None,
) -> Iterator[ConsumerProcess]:
    consumer = ConsumerProcess(arguments, settings, environment or {}, stdout)
    try:
        yield consumer
    finally:
        if consumer.process.poll() is None:
            consumer.process.send_signal(signal.SIGCONT)
            consumer.process.kill()
            consumer.process.wait()


def heads(storage: SyncStorage, datastore: Datastore) -> dict[int, int]:
    found = {name: storage.master(name).run(shard_head.heads, datastore.name) for name in datastore.clusters}
    return {head.shard: head.added_id for head in datastore.of_home(found, lambda head: head.shard)}


def reached(storage: SyncStorage, datastore: Datastore, consumer: str) -> dict[int, int]:
    """By shard, the lowest added_id that any cluster's checkpoint has."""
    found: dict[int, int] = {}
    for cluster in datastore.clusters:
        for checkpoint in storage.master(cluster).run(checkpoint_table.of_consumer, datastore.name, consumer):
            added_id = checkpoint.location.added_id
            found[checkpoint.shard] = min(found.get(checkpoint.shard, added_id), added_id)
    return found


def wait_until_finished(storage: SyncStorage, datastore: Datastore, consumer: str) -> None:
    """Until the consumer's checkpoints stand at the heads."""

    def far() -> tuple[object, object]:
        return reached(storage, datastore, consumer), heads(storage, datastore)

    until(lambda: reached(storage, datastore, consumer) == heads(storage, datastore), far)


def write_program(folder: Path, name: str, text: str) -> str:
    path = folder / f"{name}.py"
    path.write_text(text)
    return str(path)
