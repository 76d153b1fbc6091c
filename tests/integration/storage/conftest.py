"""Servers as the asynchronous driver reaches them."""

from contextlib import AsyncExitStack

import pytest

from schemaless.storage.asyncmy_driver import AsyncServer


@pytest.fixture
async def async_server():
    """Makes servers that are closed at the end of the test, however it ends."""
    async with AsyncExitStack() as opened:

        def make(*arguments, **options):
            server = AsyncServer(*arguments, **options)
            opened.push_async_callback(server.close)
            return server

        yield make
