"""Connections to MySQL are encrypted and verified where the topology says so, by both drivers (I17)."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import uvloop
from structlog.testing import capture_logs

from schemaless.errors import StorageUnavailable
from schemaless.runtime.tls import Tls
from schemaless.stack.admin import session
from schemaless.stack.local import running_topology
from schemaless.stack.plan import nodes_document
from schemaless.storage.asyncmy_driver import AsyncServer
from schemaless.storage.operation import query
from schemaless.storage.pymysql_driver import SyncNode
from schemaless.topology import parse_topology
from tests.certificates import make_certificates
from tests.conftest import FLAVOUR, SMALL_REDO_LOGS
from tests.waiting import until

pytestmark = pytest.mark.storage

CIPHER = "SHOW SESSION STATUS LIKE 'Ssl_cipher'"
RELOAD = {"mariadb": "FLUSH SSL", "mysql": "ALTER INSTANCE RELOAD TLS"}


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def running_tls(tmp_path_factory, certificates):
    """One master with a certificate, which refuses whoever doesn't encrypt over TCP."""
    files = f"ssl-ca={certificates.tls.ca}\nssl-cert={certificates.certificate}\nssl-key={certificates.key}\n"
    files += "require-secure-transport=ON\n" + SMALL_REDO_LOGS
    folder = tmp_path_factory.mktemp("tls")
    with running_topology(folder, ("a",), 0, FLAVOUR, options=files) as running:
        yield running


@pytest.fixture
def encrypted(running_tls, certificates):
    """The master as a service reaches it over TCP."""
    return replace(running_tls.topology.cluster("a").nodes[0], socket=None, tls=certificates.tls)


@pytest.fixture
def issue(running_tls, certificates):
    """Gives the server another certificate, and its good one back at the end."""
    server = running_tls.descriptions["a1"]

    def reload(*arguments, **options):
        certificates.issue(*arguments, **options)
        with session(server.administrator(running_tls.accounts)) as connected:
            connected.query(RELOAD[FLAVOUR])

    yield reload
    reload()


def by_pymysql(node):
    opened = SyncNode(node)
    try:
        return opened.run(query, CIPHER)[0][1]
    finally:
        opened.close()


async def _ask(node):
    opened = AsyncServer(node)
    try:
        return (await opened.run(query, CIPHER))[0][1]
    finally:
        await opened.close()


DRIVERS = {
    "pymysql": by_pymysql,
    "asyncmy on asyncio": lambda node: asyncio.run(_ask(node)),
    "asyncmy on uvloop": lambda node: uvloop.run(_ask(node)),
}


@pytest.fixture(params=DRIVERS)
def cipher_of(request):
    return DRIVERS[request.param]


def test_a_connection_is_encrypted(cipher_of, encrypted):
    """The server names the cipher. The topology file brings the paths."""
    document = nodes_document([encrypted])
    (cluster,) = parse_topology(document).clusters.values()
    assert cluster.nodes == (encrypted,)
    assert cipher_of(cluster.nodes[0])


def test_who_does_not_encrypt_is_refused(cipher_of, encrypted):
    """By the server. Nothing falls back to it by itself."""
    with pytest.raises(StorageUnavailable, match="a1"):
        cipher_of(replace(encrypted, tls=None))


def test_a_wrong_ca_is_refused(cipher_of, encrypted, certificates):
    with pytest.raises(StorageUnavailable, match=r"a1: its certificate is refused: .*self-signed certificate"):
        cipher_of(replace(encrypted, tls=certificates.other_tls))


def test_a_wrong_host_name_is_refused(cipher_of, encrypted):
    with pytest.raises(StorageUnavailable, match=r"a1: its certificate is refused: .* not valid for 'localhost'"):
        cipher_of(replace(encrypted, host="localhost"))


def test_an_expired_certificate_is_refused(cipher_of, encrypted, issue):
    def is_accepted():
        issue(for_s=3)  # MySQL takes none that has expired already
        return cipher_of(encrypted)

    def refusal():
        try:
            cipher_of(encrypted)
        except StorageUnavailable as error:
            return str(error)

    until(is_accepted)
    until(lambda: "a1: its certificate is refused: certificate has expired" in (refusal() or ""))


def test_a_server_without_a_certificate_of_that_ca_is_refused(cipher_of, topology, certificates):
    """MariaDB has none and MySQL makes one itself: in both cases nobody gets the password."""
    node = replace(topology.cluster("b").nodes[0], socket=None, tls=certificates.tls)
    with pytest.raises(StorageUnavailable, match="b1"):
        cipher_of(node)


def test_files_that_can_not_be_read_cost_their_node_only(cipher_of, encrypted, tmp_path):
    """It can't be used while they are replaced, which is logged, and works when they are back."""
    file = tmp_path / "ca.pem"
    node = replace(encrypted, tls=Tls(str(file)))
    for content in (None, "", "no PEM file"):
        if content is not None:
            file.write_text(content)
        refused = pytest.raises(StorageUnavailable, match=rf"a1: no TLS material can be read from {file}")
        with capture_logs() as logged, refused:
            cipher_of(node)
        assert any("TLS files" in line["event"] and line["node"] == "a1" for line in logged)
    file.write_text(Path(encrypted.tls.ca).read_text())
    assert cipher_of(node)
