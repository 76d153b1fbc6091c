"""Settings: each variable names its service, and what is wrong with one is told by its name."""

import os
from pathlib import Path

import pytest

from consumers.probe.service import program_settings
from schemaless.config import (
    ApiSettings,
    BreakerMode,
    CleanerSettings,
    ClientSettings,
    ConsumerSettings,
    IndexerSettings,
    KafkaSettings,
    MeasuredSettings,
    ProbeSettings,
    Settings,
    StackSettings,
    TailerSettings,
    TransportKind,
    read_settings,
    variable_of,
)
from schemaless.errors import Misconfigured

SERVICES = {
    ApiSettings: "API",
    CleanerSettings: "CLEANER",
    TailerSettings: "TAILER",
    IndexerSettings: "INDEXER",
    ConsumerSettings: "CONSUMERS",
    ProbeSettings: "PROBE",
}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """What every service needs, and nothing else of ours."""
    for name in [name for name in os.environ if name.startswith("SCHEMALESS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SCHEMALESS_TOPOLOGY", "topology.json")
    monkeypatch.setenv("SCHEMALESS_KAFKA", "127.0.0.1:9092")
    return monkeypatch


@pytest.mark.parametrize("kind", SERVICES, ids=lambda kind: kind.__name__)
def test_a_setting_names_the_service_that_reads_it(kind: type[Settings], environment):
    """Two services share a variable only where all do, or all beside the API."""
    for field in kind.model_fields:
        variable = variable_of(kind, field)
        shared = field in MeasuredSettings.model_fields
        assert variable.startswith("SCHEMALESS_" if shared else f"SCHEMALESS_{SERVICES[kind]}_")
        assert shared == (variable == variable_of(MeasuredSettings, field))


@pytest.mark.parametrize(
    "kind", [KafkaSettings, ClientSettings, StackSettings, ApiSettings], ids=lambda kind: kind.__name__
)
def test_an_empty_path_is_refused_by_its_variable(kind: type[Settings], environment):
    """It would be the present folder. `SCHEMALESS_KAFKA_ACCOUNT=` means that somebody wanted an account."""
    paths = {name: found.annotation for name, found in kind.model_fields.items() if "Path" in str(found.annotation)}
    assert paths
    for name in paths:
        variable = variable_of(kind, name)
        with environment.context() as one:
            one.setenv(variable, "")
            with pytest.raises(Misconfigured, match=f"^{variable}: is empty: it has to name a file or a folder"):
                kind()


def test_what_is_missing_or_malformed_is_told_by_its_variable(environment):
    """The operator sees the variable, not the field."""
    environment.setenv("SCHEMALESS_API_PORT", "eight")
    with pytest.raises(Misconfigured, match=r"^SCHEMALESS_API_PORT: .*integer"):
        read_settings(ApiSettings)
    environment.delenv("SCHEMALESS_KAFKA")
    with pytest.raises(Misconfigured, match=r"^SCHEMALESS_KAFKA: Field required"):
        read_settings(TailerSettings)


def test_the_probes_program_has_the_defaults_whatever_other_programs_are_set_to(environment):
    """It finds the same servers as the probe."""
    environment.setenv("SCHEMALESS_CONSUMERS_BREAKER", "off")
    environment.setenv("SCHEMALESS_PROBE_PERIOD_S", "3")
    own = program_settings(read_settings(ProbeSettings))
    assert (own.kafka, own.topology, own.connections_max) == ("127.0.0.1:9092", Path("topology.json"), 16)
    assert (own.breaker, own.attempts_max, own.transport) == (BreakerMode.PROBE, 20, TransportKind.FAUST)


def test_lists_are_separated_by_commas(environment):
    """Blanks around a name don't count."""
    environment.setenv("SCHEMALESS_TAILER_DATASTORES", "trips, flights,")
    assert read_settings(TailerSettings).datastores == ("trips", "flights")
