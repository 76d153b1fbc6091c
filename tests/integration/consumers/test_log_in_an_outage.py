"""What real processes log while Kafka can't be reached: lines that a person can read, and few of them."""

import re
import subprocess
import sys
import time
from contextlib import ExitStack

from schemaless.config import ConsumerSettings, IndexerSettings, TailerSettings
from schemaless.stack.plan import free_ports
from tests.consumer_harness import write_program
from tests.environment import environment_of
from tests.waiting import until

LINES_MAX = 30  # of a process in ten minutes. The limiter of repeats has a unit test of those
PROGRAM = "from schemaless import trigger\n\n@trigger(column='A')\ndef seen(cell):\n    pass\n"
HEAD = re.compile(r"^\d{4}-\d\d-\d\dT\S+Z \[\w+ *\] .*\bservice=")


def test_without_kafka_each_process_writes_few_lines_of_one_format(running, new_datastore, tmp_path):
    """The tailer, an indexer and a trigger worker, each against a port where nobody listens. One that ends says why."""
    datastore = new_datastore(shards=4, partitions=2)
    (nobody,) = free_ports(1)
    servers = {"topology": running.path, "kafka": f"127.0.0.1:{nobody}"}
    program = ["consumers", write_program(tmp_path, "seeing", PROGRAM), "--datastore", datastore.name]
    commands = {
        "tailer": (["tailer"], TailerSettings, {"datastores": datastore.name}),
        "indexer": (["indexer"], IndexerSettings, {"datastores": datastore.name}),
        "trigger": (program, ConsumerSettings, {}),
    }
    with ExitStack() as opened:
        logs = {name: opened.enter_context((tmp_path / name).open("w+")) for name in commands}
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", *arguments],
                env=environment_of(kind, {**servers, **more}),
                stdout=logs[name],
                stderr=subprocess.STDOUT,
            )
            for name, (arguments, kind, more) in commands.items()
        ]
        try:
            # The tailer's client waits longer until it gives up.
            wait_until(lambda: all(str(nobody) in (tmp_path / name).read_text() for name in ("indexer", "trigger")))
            wait_until(lambda: (tmp_path / "tailer").read_text() != "")
        finally:
            for process in processes:
                process.kill()
                process.wait()
        for name, log in logs.items():
            log.seek(0)
            lines = log.read().splitlines()
            assert 0 < len(lines) <= LINES_MAX, (name, lines)
            assert [line for line in lines if not HEAD.match(line)] == [], name


def wait_until(holds):
    until(holds)
    time.sleep(1.0)  # what more would come of the same kind
