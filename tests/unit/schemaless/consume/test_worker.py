"""A worker's reports: when they are written, and what becomes of a cluster that is away."""

import asyncio

from structlog.testing import capture_logs

from schemaless.consume.worker import Worker
from schemaless.errors import StorageUnavailable
from schemaless.storage import worker_table
from schemaless.storage.worker_table import OldestCall, WorkerReport
from schemaless.topology import Datastore


class Masters:
    """Two masters that note what is run, by cluster."""

    def __init__(self):
        self.run_on = []
        self.away = set()
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    def master(self, cluster):
        return Node(self, cluster)


class Node:
    def __init__(self, masters, cluster):
        self.masters, self.cluster = masters, cluster

    async def run(self, operation, *args, timeout_s=None):
        await self.masters.may_answer.wait()
        if self.cluster in self.masters.away:
            raise StorageUnavailable(f"{self.cluster} is away")
        self.masters.run_on.append((self.cluster, operation))


def worker(masters):
    return Worker(masters, Datastore("d", 2, 1, ("a", "b")), "trigger:p")


async def test_news_are_told_at_once_and_that_the_process_lives_now_and_then():
    masters = Masters()
    process = worker(masters)
    hangs = [WorkerReport(pid=1, oldest_call=OldestCall("f", "cell", 0, age_s)) for age_s in (2.0, 3.0)]
    for now, report, told in (
        (0.0, WorkerReport(pid=1), 2),
        (1.0, WorkerReport(pid=1), 0),
        (2.0, hangs[0], 2),
        (3.0, hangs[1], 0),  # a reader adds the row's age
        (12.0, hangs[1], 2),
    ):
        masters.run_on.clear()
        await process.tell(report, now)
        assert len(masters.run_on) == told, now


async def test_a_cluster_that_is_away_keeps_nobody_from_telling_the_others():
    masters = Masters()
    masters.away = {"a"}
    with capture_logs() as logs:
        await worker(masters).tell(WorkerReport(pid=1), 0.0)
        await worker(masters).leave()
    assert masters.run_on == [("b", worker_table.put), ("b", worker_table.remove)]
    assert [line["cluster"] for line in logs] == ["a", "a"]


async def test_a_report_in_flight_makes_no_row_after_the_process_left():
    masters = Masters()
    process = worker(masters)
    masters.may_answer.clear()
    telling = asyncio.create_task(process.tell(WorkerReport(pid=1), 0.0))
    await asyncio.sleep(0)
    telling.cancel()
    leaving = asyncio.create_task(process.leave())
    await asyncio.sleep(0)
    masters.may_answer.set()
    await leaving
    assert [operation for _, operation in masters.run_on[-2:]] == [worker_table.remove] * 2
    assert len(masters.run_on) == 4
