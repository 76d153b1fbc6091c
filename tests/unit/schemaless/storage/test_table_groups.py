"""Every table of schema.sql says where its rows live. So none is forgotten when a cluster is added or a shard moved."""

import re
from pathlib import Path

from schemaless.storage import schema
from schemaless.storage.schema import GROUPS

TEXT = (Path(schema.__file__).parent / "schema.sql").read_text()


def test_every_table_has_a_group_and_every_group_a_table():
    assert set(re.findall(r"CREATE TABLE IF NOT EXISTS \S+\.(\w+) ", TEXT)) == GROUPS.keys()
