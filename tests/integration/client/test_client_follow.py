"""The client's tail and `schemaless log --follow` against real API processes that die and come back."""

import asyncio
import json
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from schemaless import AsyncClient, Client, Location
from schemaless.errors import LocationGone
from tests.integration.api.api_harness import ROOT, api_process, row_in
from tests.integration.api.follow_harness import wait_for_followers
from tests.log_harness import restore
from tests.waiting import LIMIT_S, until


@pytest.fixture
def datastore(make_datastore):
    return make_datastore()


@pytest.fixture
def client(api, datastore):
    with Client([f"http://127.0.0.1:{api.port}"], datastore=datastore.name) as opened:
        yield opened


def put(client, datastore, count, shard=0):
    """Until all cells are at home: a master that stands for a moment doesn't take them, and no cleaner runs here."""
    cells = [(row_in(datastore, shard), "BASE", 1, {"n": n}) for n in range(count)]
    until(lambda: all(done and done.added_id for done in client.put_cells(cells)))


def test_a_tail_follows_one_shard_from_any_start(api, client, datastore):
    """The beginning, a location, the end; and then each cell as it is put."""
    put(client, datastore, 5)
    tails = {start: client.tail(0, start, wait_s=1) for start in (None, 3, "1:4", "end")}
    assert [
        [next(tails[start]).added_id for _ in range(count)] for start, count in ((None, 5), (3, 2), ("1:4", 1))
    ] == [
        [1, 2, 3, 4, 5],
        [4, 5],
        [5],
    ]
    client._run(tails["end"]._tail.fetch())  # it stands at the end of now
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(lambda: [next(tail).added_id for tail in tails.values()])
        wait_for_followers(api, 1)
        put(client, datastore, 1)
        assert reading.result() == [6] * 4
    (end,) = tails["end"].locations.values()
    assert (end.location, end) == (Location(1, 6), tails[3].locations[0])
    with pytest.raises(LocationGone, match="shard 0: 7 is past the head"):
        next(client.tail(0, 7))


def test_a_tail_of_a_restored_log_that_grew_again_gives_nothing(client, datastore, storage):
    """Whether it waited meanwhile or continues from stored positions. At the head, too (I16)."""
    put(client, datastore, 4)
    tail = client.tail([0, 1], wait_s=1)
    assert [next(tail).added_id for _ in range(4)] == [1, 2, 3, 4]
    stored = tail.locations
    restore(storage.master(datastore.home(0)), datastore, 0, 2)
    put(client, datastore, 2)
    with pytest.raises(LocationGone, match="shard 0: another cell is at 1:4"):
        next(client.tail(stored))
    put(client, datastore, 1)
    with pytest.raises(LocationGone, match="shard 0: another cell is at 1:4"):
        next(tail)
    with pytest.raises(LocationGone, match="another history"):
        client.get_cells_for_shard(0, stored[0])


@pytest.mark.faults
def test_a_tail_of_all_shards_outlives_its_hosts(running, api, datastore):
    """Writers on all shards while one API process after the other is killed and started anew: every cell of every
    shard comes once, in its shard's order.
    """
    with api_process(running.path) as one, api_process(running.path) as two:
        hosts = [f"http://127.0.0.1:{process.port}" for process in (one, two)]
        with (
            ThreadPoolExecutor(1) as pool,  # it ends last, and the reader with its client
            Client(hosts, datastore=datastore.name) as client,
            Client([f"http://127.0.0.1:{api.port}"], datastore=datastore.name) as writer,
        ):
            expected = 60 * (5 + datastore.shards)

            def read():
                tail, cells = client.tail(wait_s=1), []
                for count in range(1, expected + 1):
                    cells.append(next(tail))
                    if count == expected // 4:
                        one.process.kill()
                return cells

            reading = pool.submit(read)
            for _ in range(60):
                put(writer, datastore, 5, shard=0)
                for shard in range(datastore.shards):
                    put(writer, datastore, 1, shard)
            cells = reading.result(LIMIT_S)
    by_shard = {shard: [cell.added_id for cell in cells if cell.shard == shard] for shard in range(datastore.shards)}
    assert by_shard == {shard: list(range(1, (360 if shard == 0 else 60) + 1)) for shard in range(datastore.shards)}


async def test_the_async_tail_does_the_same_and_can_be_given_up(api, client, datastore):
    """A task that waits for the next cell is cancelled; the tail goes on afterwards where it stood."""
    async with AsyncClient([f"http://127.0.0.1:{api.port}"], datastore=datastore.name) as other:
        await asyncio.to_thread(put, client, datastore, 2)
        tail = other.tail([0, 1])
        assert [(await anext(tail)).added_id for _ in range(2)] == [1, 2]
        waiting = asyncio.ensure_future(anext(tail))
        await asyncio.sleep(0.2)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await asyncio.to_thread(put, client, datastore, 1, 1)
        async for cell in tail:
            assert (cell.shard, cell.added_id) == (1, 1)
            break


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_the_log_command_follows_until_it_is_interrupted(api, client, datastore, form):
    """Each cell is a line as soon as it is there; an interrupt ends it in order and tells where to go on."""
    put(client, datastore, 2)
    command = [sys.executable, "-m", "schemaless", "log", "0", "--after", "1:1", "--follow", *form]
    where = ["--hosts", f"http://127.0.0.1:{api.port}", "--datastore", datastore.name]
    with subprocess.Popen(
        command + where, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        try:
            lines = [process.stdout.readline()]
            put(client, datastore, 1)
            lines.append(process.stdout.readline())
            process.send_signal(signal.SIGINT)
            rest, said = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
    assert (process.returncode, rest, said[:9]) == (0, "", "next 1:3:")
    shown = [json.loads(line)["added_id"] if form else int(line.split()[0].split(":")[2]) for line in lines]
    assert shown == [2, 3]
