"""Accounts that are rotated while processes run, by both drivers: what is taken up, what stays and how it is named."""

import asyncio
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from schemaless.errors import AccountRefused
from schemaless.stack.programs import Flavour
from schemaless.storage.admin_session import AdminSession
from schemaless.storage.asyncmy_driver import AsyncServer, AsyncStorage
from schemaless.storage.operation import query
from schemaless.storage.pymysql_driver import SyncNode, SyncStorage, connect
from schemaless.storage.translation import refusals
from schemaless.topology import load_topology
from tests.conftest import FLAVOUR
from tests.rotated_account import rotated_account
from tests.waiting import async_until

pytestmark = pytest.mark.storage

PAGE = Path(__file__).parents[3] / "docs" / "production.md"


@pytest.fixture
def rotated(running, tmp_path):
    with rotated_account(running, tmp_path / "topology.json") as account:
        yield account


class Threaded:
    """The synchronous driver with the face of the other one."""

    def __init__(self, node):
        self._driver = SyncNode(node, timeout_s=60.0)

    @property
    def node(self):
        return self._driver.node

    async def run(self, *asked):
        return await asyncio.to_thread(self._driver.run, *asked)

    async def close(self):
        self._driver.close()


@pytest.fixture(params=["pymysql", "asyncmy"])
async def opened(request, rotated):
    server = (
        Threaded(rotated.node("b1")) if request.param == "pymysql" else AsyncServer(rotated.node("b1"), timeout_s=60.0)
    )
    yield server
    await server.close()


async def test_an_account_is_taken_up_when_the_server_refuses_the_old_one(rotated, opened):
    """And it costs one refusal, not one for each connection."""
    await opened.run(query, "SELECT 1")
    rotated.rotate("second")
    rotated.write("second")
    rotated.cut()
    before = refusals.counts["b1", 1045]
    assert await opened.run(query, "SELECT 1") == ((1,),)
    assert opened.node.password == "second"
    rotated.cut()
    assert await opened.run(query, "SELECT 1") == ((1,),)
    assert refusals.counts["b1", 1045] - before == 1


async def test_the_page_s_way_is_one_of_two_passwords(rotated, opened):
    """No connection is refused until the old password is gone, and then one at most."""
    kind = "MySQL" if FLAVOUR is Flavour.MYSQL else "MariaDB"
    (row,) = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| {kind} | `ALTER USER")]
    second, alone = [
        text.replace("'schemaless'", f"'{rotated.user}'").replace("'NEW'", "'second'").replace("'OLD'", "'first'")
        for text in row.split("`")[1::2]
    ]
    before = refusals.counts["b1", 1045]
    rotated.sql(second)
    rotated.cut()
    assert await opened.run(query, "SELECT 1") == ((1,),)
    assert refusals.counts["b1", 1045] == before
    rotated.write("second")
    rotated.sql(alone)
    rotated.cut()
    assert await opened.run(query, "SELECT 1") == ((1,),)
    assert refusals.counts["b1", 1045] - before == 1


async def test_a_connection_stays_and_a_refusal_names_server_and_account(rotated, opened):
    await opened.run(query, "SELECT 1")
    (connection,) = rotated.connections("b1")
    rotated.rotate("second")
    assert await opened.run(query, "SELECT CONNECTION_ID()") == ((connection,),)
    rotated.cut()  # the next attempt finds the connection lost, and makes one
    with pytest.raises(AccountRefused, match=f"^b1 refuses the account '{rotated.user}': Access denied") as refused:
        await opened.run(query, "SELECT 1")
    assert "first" not in str(refused.value)
    rotated.path.write_text('{"version"')

    async def taken_up():
        try:
            return await opened.run(query, "SELECT 1")
        except AccountRefused:
            return None

    assert await taken_up() is None
    rotated.write("second")
    assert await async_until(taken_up) == ((1,),)


async def test_a_password_that_expired_is_named_so(rotated, opened):
    rotated.sql(f"ALTER USER '{rotated.user}'@'%' PASSWORD EXPIRE")
    with pytest.raises(AccountRefused, match=f"b1 refuses the account '{rotated.user}': its password has expired"):
        await opened.run(query, "SELECT 1")


async def test_a_storage_keeps_its_connections_when_the_file_names_another_account(rotated):
    async with AsyncStorage(load_topology(rotated.path), timeout_s=60.0) as storage:
        server = storage.nodes["b1"]
        held = await server.run(query, "SELECT CONNECTION_ID()")
        rotated.rotate("second")
        rotated.write("second")

        async def followed():
            return server.node.password == "second"

        await async_until(followed)
        assert storage.nodes["b1"] is server
        assert held[0][0] in rotated.connections("b1")
        rotated.cut()
        assert await server.run(query, "SELECT 1") == ((1,),)


def test_an_administrator_s_session_and_the_command_line_take_it_up(rotated):
    """Whatever holds what was read of the file before: a controller, a command that runs for hours."""
    topology = load_topology(rotated.path)
    rotated.rotate("second")
    rotated.write("second")
    with closing(AdminSession(topology.nodes["b1"])) as session:
        assert session.query("SELECT 1 AS it") == [{"it": 1}]
    with SyncStorage(topology, timeout_s=60.0) as storage:
        assert storage.master("b").run(query, "SELECT 1") == ((1,),)


def test_an_account_that_is_blocked_after_wrong_passwords_is_refused(rotated, running):
    """It runs, whatever the number of the error, so nobody takes it for dead."""
    right = rotated.node("b1")
    wrong, administrator = replace(right, password="wrong", file=None), running.administrators.nodes["b1"]
    with AdminSession(administrator) as session:
        if FLAVOUR is Flavour.MYSQL:
            session.query(f"ALTER USER '{rotated.user}'@'%' FAILED_LOGIN_ATTEMPTS 2 PASSWORD_LOCK_TIME 1")
        else:
            session.query("SET GLOBAL max_password_errors = 2")
        try:
            for node in (wrong, wrong, wrong, replace(right, file=None)):
                with pytest.raises(AccountRefused, match=f"b1 refuses the account '{rotated.user}'"):
                    connect(node, 2.0, 10.0)
        finally:
            if FLAVOUR is not Flavour.MYSQL:
                session.query("SET GLOBAL max_password_errors = DEFAULT; FLUSH PRIVILEGES")
