"""Both drivers over a transport in memory: the same calls, the same answers, the same attempts."""

import asyncio
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest

import schemaless
from deploy.write_sync_client import ASYNC_FILE, SYNC_FILE, sync_source
from schemaless import AsyncClient, Client, Limits, SchemalessClient
from schemaless.errors import Unauthenticated, Unavailable

ROW = "5b1d5b2e-8d5a-4a3e-9a53-4f0f6a3f2a11"
HOSTS = ["http://one", "http://two"]
QUICK = Limits(attempts_max=4, total_timeout_s=2.0, pause_s=0.001)
PUT = {"row_key": ROW, "column_name": "A", "ref_key": 1, "status": "stored", "shard": 0, "copies": 2}

Handler = Callable[[httpx.Request], httpx.Response]
Ask = Callable[..., Any]


def put_sync(handler: Handler, token: str | None = "t") -> Any:
    with Client(HOSTS, datastore="m", token=token, limits=QUICK, transport=httpx.MockTransport(handler)) as client:
        return client.put(ROW, "A", {"n": 1})


def put_async(handler: Handler, token: str | None = "t") -> Any:
    async def put() -> Any:
        transport = httpx.MockTransport(handler)
        async with AsyncClient(HOSTS, datastore="m", token=token, limits=QUICK, transport=transport) as client:
            return await client.put(ROW, "A", {"n": 1})

    return asyncio.run(put())


both = pytest.mark.parametrize("ask", [put_sync, put_async])


def stored() -> httpx.Response:
    return httpx.Response(201, content=msgspec.json.encode(PUT), headers={"content-type": "application/json"})


@both
def test_a_call_survives_a_dead_host_and_a_busy_one(ask: Ask):
    """Another host is tried after a refused connection, and the same request again after a 503."""
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        if len(seen) == 1:
            raise httpx.ConnectError("refused")
        return httpx.Response(503, json={"retryable": True}) if len(seen) == 2 else stored()

    assert ask(handler).copies == 2
    assert seen[0].url.host != seen[1].url.host
    assert len({request.headers["idempotency-key"] for request in seen}) == 1
    assert {request.content for request in seen} == {msgspec.msgpack.encode({"n": 1})}
    assert {request.headers["authorization"] for request in seen} == {"Bearer t"}


@both
def test_a_call_that_nobody_answers_ends_in_our_error(ask: Ask):
    """The last failure is told after the bounded attempts."""
    attempts = 0

    def handler(request: httpx.Request) -> httpx.Response:
        nonlocal attempts
        attempts += 1
        raise httpx.ReadTimeout("hangs", request=request)

    with pytest.raises(Unavailable, match="hangs"):
        ask(handler)
    assert attempts == QUICK.attempts_max


async def test_a_cancelled_call_leaves_its_host_in_good_standing():
    """Whoever stops waiting says nothing against the host, and it isn't counted as busy for ever."""
    started = asyncio.Event()

    async def handler(request: httpx.Request) -> httpx.Response:
        started.set()
        await asyncio.sleep(60)
        return stored()

    async with AsyncClient(HOSTS[:1], datastore="m", transport=httpx.MockTransport(handler)) as client:
        task = asyncio.create_task(client.put(ROW, "A", {}))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert client._hosts._hosts[HOSTS[0]].in_flight == 0
        assert client._hosts._hosts[HOSTS[0]].failures == 0


def test_the_sync_client_is_what_its_script_writes():
    """So the two drivers have the same calls, and do the same."""
    rewrite = "run `.venv/bin/python deploy/write_sync_client.py`, which writes schemaless/client/client.py anew"
    assert SYNC_FILE.read_text() == sync_source(ASYNC_FILE.read_text()), rewrite


async def test_a_program_is_given_orders():
    """Each goes to the call of its name, with the members that the call has."""
    seen: list[tuple[str, Any]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append((request.url.path.removeprefix("/v1/m/triggers/billing/"), msgspec.msgpack.decode(request.content)))
        return httpx.Response(200, json={})

    async with AsyncClient(HOSTS, datastore="m", transport=httpx.MockTransport(handler)) as client:
        program = client.program("billing")
        await program.retry(filter={}, rate=5)
        await program.discard(ids=["0:1:1:bill"], reason="test rides")
        await program.pause([3])
        await program.resume()
        await program.seek("end", dry_run=True)
    assert seen == [
        ("parked/retry", {"filter": {}, "rate": 5}),
        ("parked/discard", {"ids": ["0:1:1:bill"], "reason": "test rides"}),
        ("pause", {"shards": [3], "reason": None}),
        ("resume", {"shards": []}),
        ("seek", {"to": "end", "shards": [], "dry_run": True}),
    ]


def test_hosts_and_token_come_from_the_environment(monkeypatch: pytest.MonkeyPatch):
    """SchemalessClient of the source texts is the same class, and needs only its datastore."""
    monkeypatch.setenv("SCHEMALESS_HOSTS", "http://one, http://two/")
    monkeypatch.setenv("SCHEMALESS_TOKEN", "secret")
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return stored()

    with SchemalessClient(datastore="mezzanine", transport=httpx.MockTransport(handler)) as client:
        client.put(ROW, "A", {})
        client.put(ROW, "A", {})
    assert {str(request.url) for request in seen} == {
        f"http://{host}/v1/mezzanine/cells/{ROW}/A" for host in ("one", "two")
    }
    assert seen[0].headers["authorization"] == "Bearer secret"


def test_public_names_are_sorted_and_exist():
    """`__all__` is sorted, and every name in it can be had."""
    assert schemaless.__all__ == sorted(schemaless.__all__)
    assert all(getattr(schemaless, name) is not None for name in schemaless.__all__)
    with pytest.raises(AttributeError):
        _ = schemaless.no_such_name


def test_importing_the_core_loads_neither_http_nor_faust():
    """A program that needs only the domain starts quickly."""
    late = {"httpx", "aiohttp", "urllib3", "faust", "pymysql"}
    code = f"import schemaless, schemaless.codec, sys; print({late} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@both
def test_an_answer_that_cannot_be_decompressed_is_one_that_never_came(ask: Ask):
    """I15: a proxy broke it. The next attempt counts, and the caller sees no error of the HTTP library."""
    seen: list[httpx.Request] = []
    closed: list[bool] = []

    class Broken(httpx.SyncByteStream, httpx.AsyncByteStream):
        def __iter__(self):
            yield b"not gzip"

        async def __aiter__(self):
            yield b"not gzip"

        def close(self):
            closed.append(True)

        async def aclose(self):
            closed.append(True)

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        broken = httpx.Response(201, stream=Broken(), headers={"content-encoding": "gzip"})
        return broken if len(seen) == 1 else stored()

    assert ask(handler).copies == 2
    assert closed == [True]  # so its connection is free


NOTHING_TO_SEND = pytest.mark.parametrize("cells", [[], [(ROW, "A", 1, {"n": b"bytes"})]], ids=["none", "all refused"])


def never_asked(request: httpx.Request) -> httpx.Response:
    raise AssertionError(f"{request.url} was asked for nothing")


@NOTHING_TO_SEND
async def test_a_batch_of_which_nothing_can_be_sent_ends_with_its_results(cells: list[Any]):
    """It is over before its first request. That came out as a RuntimeError."""
    async with AsyncClient(HOSTS, datastore="m", transport=httpx.MockTransport(never_asked)) as client:
        assert [result.status for result in await client.put_cells(cells)] == ["error"] * len(cells)


@both
@pytest.mark.parametrize("kept_before", ["sl_old", None])
def test_a_token_that_is_refused_is_read_again_where_it_was_found(ask: Ask, kept_before, tmp_path, monkeypatch):
    """It was renewed, or it is the first one. One that is still refused is an error."""
    file = tmp_path / "token"
    monkeypatch.setenv("SCHEMALESS_TOKEN_FILE", str(file))

    def keep(token: str) -> None:
        file.write_text(token)
        file.chmod(0o600)

    if kept_before:
        keep(kept_before)
    seen: list[str | None] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers.get("authorization"))
        if len(seen) == 1:
            keep("sl_new")
        return httpx.Response(401, json={"status": 401}) if len(seen) == 1 else stored()

    assert ask(handler, token=None).copies == 2
    assert seen == [kept_before and f"Bearer {kept_before}", "Bearer sl_new"]
    refused: list[str] = []

    def refuse(request: httpx.Request) -> httpx.Response:
        refused.append(request.headers["authorization"])
        return httpx.Response(401, json={"status": 401})

    with pytest.raises(Unauthenticated):
        ask(refuse, token=None)
    assert refused == ["Bearer sl_new"]
