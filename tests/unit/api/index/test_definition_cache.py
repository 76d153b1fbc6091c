"""When an index that is building will be ready, by the pace since this process first looked."""

from api.index.definition_cache import BuildEta
from schemaless.storage.index_definition_table import BuildProgress


def test_the_time_left_follows_the_pace_that_was_seen():
    """No pace is known at the first look, while tables are being made, or while nothing was built."""
    now = 100.0
    eta = BuildEta(lambda: now)
    assert eta.seconds("trips", "driver", BuildProgress(10, 110)) is None
    now = 105.0
    assert eta.seconds("trips", "driver", BuildProgress(10, 110)) is None
    assert eta.seconds("trips", "driver", BuildProgress(60, None)) is None
    assert eta.seconds("trips", "driver", BuildProgress(60, 110)) == 5.0
    assert eta.seconds("trips", "other", BuildProgress(60, 110)) is None
    eta.forget("trips", "driver")
    assert eta.seconds("trips", "driver", BuildProgress(60, 110)) is None
