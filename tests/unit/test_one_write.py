"""Answers leave in one write, in order, and none is lost when the connection closes."""

import asyncio

from api.one_write import GatheringTransport


class Recorder(asyncio.Transport):
    """Remembers what reaches the socket."""

    def __init__(self):
        super().__init__()
        self.did = []

    def write(self, data):
        self.did.append(bytes(data))

    def close(self):
        self.did.append("closed")

    def get_extra_info(self, name, default=None):
        return f"the {name}"


async def test_what_is_written_in_one_turn_leaves_together():
    """Head and body of an answer become one write; the next turn's answer is another one."""
    recorder = Recorder()
    transport = GatheringTransport(recorder, asyncio.get_running_loop())
    transport.write(b"head ")
    transport.write(b"body")
    assert recorder.did == []
    await asyncio.sleep(0)
    transport.write(b"next")
    await asyncio.sleep(0)
    assert recorder.did == [b"head body", b"next"]


async def test_closing_sends_what_was_written_first():
    """An answer with `connection: close` is written and closed in the same turn."""
    recorder = Recorder()
    transport = GatheringTransport(recorder, asyncio.get_running_loop())
    transport.write(b"goodbye")
    transport.close()
    await asyncio.sleep(0)
    assert recorder.did == [b"goodbye", "closed"]


async def test_everything_else_is_the_real_transports():
    """Addresses, flow control and the like are asked of the socket's own transport."""
    transport = GatheringTransport(Recorder(), asyncio.get_running_loop())
    assert transport.get_extra_info("peername") == "the peername"
