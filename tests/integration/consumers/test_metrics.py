"""What the services show about cells that pass them, as Prometheus would read it from real processes."""

import shutil
import subprocess
import sys
from contextlib import ExitStack, contextmanager

import httpx
from prometheus_client.parser import text_string_to_metric_families

from schemaless.config import CleanerSettings, TailerSettings
from schemaless.stack.plan import free_ports
from tests.consumer_harness import running_consumer, write_program
from tests.environment import environment_of
from tests.waiting import async_until

PROGRAM = "from schemaless import trigger\n\n@trigger(column='A')\ndef seen(cell):\n    pass\n"


@contextmanager
def running_service(name, kind, settings):
    process = subprocess.Popen([sys.executable, "-m", name], env=environment_of(kind, settings))
    try:
        yield
    finally:
        process.kill()
        process.wait()


def samples(port):
    """Every sample of a process, by name and labels. Nothing while it doesn't answer."""
    try:
        text = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    except httpx.TransportError:
        return {}
    if (promtool := shutil.which("promtool")) is not None:
        checked = subprocess.run(
            [promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False
        )
        assert checked.returncode == 0, checked.stdout + checked.stderr
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_every_service_shows_the_cells_that_passed_it(running, kafka, api, new_datastore, tmp_path):
    """Counted, timed, and none behind when all is done."""
    datastore = new_datastore(shards=4, partitions=2)
    ports = dict(zip(("tailer", "cleaner", "indexer", "trigger"), free_ports(4), strict=True))
    servers = {"topology": running.path, "kafka": kafka}
    index = {"shard_field": "n", "fields": [{"name": "n", "column": "A", "path": "n", "type": "int"}]}
    assert api.at(datastore)("PUT", "/indexes/by_n", json=index).is_success
    with ExitStack() as started:
        for name, kind, more in (
            ("tailer", TailerSettings, {"datastores": datastore.name}),
            ("cleaner", CleanerSettings, {}),
        ):
            started.enter_context(running_service(name, kind, {**servers, **more, "metrics_port": ports[name]}))
        own = {**servers, "datastores": datastore.name}
        started.enter_context(running_consumer(["indexer"], {**own, "metrics_port": ports["indexer"]}))
        program = write_program(tmp_path, "seeing", PROGRAM)
        arguments = ["consumers", program, "--datastore", datastore.name]
        started.enter_context(running_consumer(arguments, {**own, "metrics_port": ports["trigger"]}))
        for n in range(20):
            path = f"/cells/00000000-0000-4000-8000-{n:012d}/A/1"
            assert api.at(datastore)("PUT", path, json={"n": n}).is_success
        name = datastore.name
        await async_until(lambda: value_of(samples(ports["tailer"]), "tailer_cells_total", datastore=name) == 20)
        for service in ("indexer", "trigger"):
            await async_until(lambda service=service: lags_of(samples(ports[service])) == [0, 0])
        await async_until(lambda: rows_of(samples(ports["cleaner"])) >= 20)
        lag = {"datastore": name, "partition": "0"}  # absent while the heads of a cluster can't be read
        await async_until(lambda: value_of(samples(ports["tailer"]), "tailer_lag_cells", **lag) == 0)
        tailer, trigger, cleaner = (samples(ports[service]) for service in ("tailer", "trigger", "cleaner"))
    assert value_of(tailer, "tailer_stage_seconds_count", datastore=name, stage="commit") > 0
    of_program = {"datastore": name, "consumer": "trigger:seeing"}
    assert value_of(trigger, "consumer_calls_total", **of_program, function="seen", outcome="succeeded") == 20
    assert value_of(trigger, "consumer_member", datastore=name) == 1
    of_pass = {"secondary": "a", "home": "b", "pass": "confirmation"}
    assert value_of(cleaner, "cleaner_pass_age_seconds", **of_pass) < 60


def value_of(found, metric, **labels):
    return found.get((f"schemaless_{metric}", frozenset(labels.items())))


def lags_of(found):
    return [value for (name, _), value in found.items() if name == "schemaless_consumer_lag_cells"]


def rows_of(found):
    return sum(value for (name, _), value in found.items() if name == "schemaless_cleaner_rows_total")
