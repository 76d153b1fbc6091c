"""docs/production.md: its accounts suffice for what its reader does next, on real servers."""

import json
import re
import uuid
from pathlib import Path

import pytest

from schemaless.ops.datastores import create_shards, list_datastores
from schemaless.storage.operation import query
from schemaless.storage.pymysql_driver import SyncStorage
from schemaless.topology import Datastore, load_topology

pytestmark = pytest.mark.storage

PAGE = (Path(__file__).parents[3] / "docs" / "production.md").read_text()


def block(language):
    (text,) = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return text


def test_the_accounts_of_the_page_may_create_a_datastore_by_the_topology_of_the_page(admin, topology, tmp_path):
    """Without an administrators' file. The names are of this test, and the nodes are its servers (I17)."""
    name = f"p{uuid.uuid4().hex[:8]}"
    statements = block("sql").replace("'schemaless'@", f"'{name}'@").replace("trips", name)
    for cluster in ("a", "b"):
        for statement in filter(None, map(str.strip, statements.split(";\n"))):
            admin.master(cluster).run(query, statement)
    document = json.loads(block("json"))
    for cluster, nodes in document["clusters"].items():
        master = topology.cluster(cluster).nodes[0]
        place = {"host": "127.0.0.1", "port": master.port, "socket": master.socket, "user": name}
        nodes[0] |= place
        nodes[0].pop("tls", None)  # of a server that has certificates
        del nodes[1:]
    file = tmp_path / "topology.json"
    file.write_text(json.dumps(document))
    file.chmod(0o600)
    with SyncStorage(load_topology(file)) as storage:
        datastore = create_shards(storage, Datastore(name, 4, 2, ("a", "b")))
        assert list_datastores(load_topology(file))[name] == datastore
        assert storage.master("a").run(query, f"SELECT COUNT(*) FROM {datastore.database(0)}.entity") == ((0,),)
    for cluster in ("a", "b"):
        admin.master(cluster).run(query, f"DROP USER '{name}'@'%'")
