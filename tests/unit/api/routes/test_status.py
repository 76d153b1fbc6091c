"""What is said of a consumer while clusters can't be asked. No server."""

import pytest

from api.routes.status import stalled
from api.triggers.control import TriggerControl
from schemaless.errors import AccountRefused, StorageUnavailable
from schemaless.facts.servers import Unheard
from schemaless.names import Stall
from schemaless.topology import Datastore

REFUSED = AccountRefused("a1 refuses the account 'u': Access denied", "a1 refuses the account 'u'")


@pytest.mark.parametrize(("error", "word"), [(REFUSED, Stall.REFUSED), (StorageUnavailable("away"), Stall.MASTER_DOWN)])
@pytest.mark.parametrize("whole", [True, False])
def test_a_consumer_says_whether_a_master_is_down_or_refuses_the_account(error, word, whole):
    """Whether a minion answers in its place or nobody."""
    unheard = Unheard({}, {"a": error}) if whole else Unheard({"a": error}, {})
    assert stalled(unheard, [], "trigger:billing") == (word, f"the master of cluster a can't be asked: {error}")


class Masters:
    """One answers that it knows nothing, and the other one refuses the account."""

    def __init__(self, cluster=None):
        self._cluster = cluster

    def master(self, cluster):
        return Masters(cluster)

    async def run(self, question):
        if self._cluster == "a":
            raise REFUSED
        return False


async def test_a_program_that_may_be_where_the_account_is_refused_names_who_does():
    control = TriggerControl(Masters(), Datastore("trips", 2, 1, ("a", "b")), "billing")
    with pytest.raises(AccountRefused, match="Access denied") as raised:
        await control.require_known()
    assert raised.value.shown == REFUSED.shown
