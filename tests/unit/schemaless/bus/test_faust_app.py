"""Heartbeats: when a Faust app may still believe that its partitions are its own (I10)."""

from schemaless.bus.faust_app import Heartbeats


class Coordinator:
    """aiokafka's, as far as heartbeats go. Sending one takes a second."""

    member_id, generation = "me", 7

    def __init__(self):
        self.now = 100.0
        self.answers = True

    async def _do_heartbeat(self):
        self.now += 1.0
        return self.answers


async def test_only_an_answered_heartbeat_counts_and_from_when_it_was_sent():
    coordinator = Coordinator()
    heartbeats = Heartbeats(coordinator, clock=lambda: coordinator.now)
    coordinator.now = 110.0
    assert heartbeats.age_s == 10.0
    assert await coordinator._do_heartbeat()
    assert heartbeats.age_s == 1.0
    coordinator.answers = False
    assert not await coordinator._do_heartbeat()
    assert heartbeats.age_s == 2.0


async def test_a_rebalance_is_an_answer():
    coordinator = Coordinator()
    heartbeats = Heartbeats(coordinator, clock=lambda: coordinator.now)
    coordinator.now = 110.0
    assert heartbeats.joined() == ("me", 7)
    assert heartbeats.age_s == 0.0
