"""Rows of a server that can't be read are an error of ours: they end no process (I15)."""

import pytest

from schemaless.errors import Corrupt
from schemaless.storage import schema, token_table
from schemaless.storage.operation import Result
from schemaless.storage.schema import FORMAT_VERSION

TOKEN = (bytes(32), "one", '["*"]', "read", 1, 2, None)


@pytest.mark.parametrize("wrong", [{2: "no JSON"}, {2: "7"}, {3: "owner"}])
def test_a_row_that_is_no_token(wrong):
    """It isn't passed over: were it the only one, access would seem to be off."""
    operation = token_table.all_rows()
    next(operation)
    row = tuple(wrong.get(position, value) for position, value in enumerate(TOKEN))
    with pytest.raises(Corrupt, match="token"):
        operation.send([Result([TOKEN, row])])


def test_a_row_that_is_no_datastore():
    """Another server may know it."""
    operation = schema.datastores()
    next(operation)
    operation.send([Result([(FORMAT_VERSION,)])])
    with pytest.raises(Corrupt, match="datastore"):
        operation.send([Result([("trips", 4, 2, "no JSON")])])
