"""The datastore that every stack has from its first start. Owns its name and counts."""

from __future__ import annotations

from schemaless.errors import SchemalessError
from schemaless.topology import Topology

DEFAULT_DATASTORE = "mezzanine"
SHARDS = 64  # the production default, 4096, takes minutes to make
PARTITIONS = 8


def create_default_datastore(topology: Topology, kafka_bootstrap: str) -> None:
    """Does nothing when it is there already, even while a master is away. Raises what `create_datastore` raises."""
    from schemaless.ops.datastores import create_datastore, list_datastores

    try:
        exists = DEFAULT_DATASTORE in list_datastores(topology)
    except SchemalessError:  # the catalogue itself isn't made yet
        exists = False
    if not exists:
        create_datastore(topology, kafka_bootstrap, DEFAULT_DATASTORE, SHARDS, PARTITIONS)
