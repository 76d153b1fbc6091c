"""Programs that were told of no servers find the embedded stack by its endpoints.json."""

import json
from pathlib import Path

import pytest

from schemaless import Client, Misconfigured, kafka_address
from schemaless.client.transport import settings_of

API = ["http://127.0.0.1:20001", "http://127.0.0.1:20002"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("HOSTS", "TOKEN", "TOKEN_FILE", "KAFKA", "PROFILE"):
        monkeypatch.delenv(f"SCHEMALESS_{name}", raising=False)
    monkeypatch.setenv("SCHEMALESS_HOME", str(tmp_path))
    return tmp_path


def write_endpoints(home: Path) -> None:
    (home / "endpoints.json").write_text(json.dumps({"api": API, "kafka": "127.0.0.1:20003", "clusters": {}}))


def test_a_client_that_was_told_of_no_host_finds_the_stack(home: Path) -> None:
    """With its token, once it has one. A host or a token that somebody named goes first."""
    write_endpoints(home)
    assert settings_of().hosts == tuple(API)
    assert settings_of().token is None
    token = home / "token"
    token.touch(mode=0o600)
    token.write_text("sl_of_the_stack\n")
    assert settings_of().token.get_secret_value() == "sl_of_the_stack"
    assert settings_of(token="mine").token.get_secret_value() == "mine"
    named = settings_of(["http://elsewhere:8000"])
    assert (named.hosts, named.token) == (("http://elsewhere:8000",), None)
    with Client(datastore="mezzanine"):
        pass


def test_the_environment_goes_before_the_stack(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_endpoints(home)
    monkeypatch.setenv("SCHEMALESS_HOSTS", "http://elsewhere:8000")
    assert settings_of().hosts == ("http://elsewhere:8000",)
    assert kafka_address() == "127.0.0.1:20003"
    assert kafka_address("given:9092") == "given:9092"
    monkeypatch.setenv("SCHEMALESS_KAFKA", "elsewhere:9092")
    assert kafka_address() == "elsewhere:9092"


def test_without_a_stack_the_error_says_what_to_do(home: Path) -> None:
    with pytest.raises(Misconfigured, match="schemaless up"):
        Client(datastore="mezzanine")
    with pytest.raises(Misconfigured, match="schemaless up"):
        kafka_address()
    (home / "endpoints.json").write_text("{")
    with pytest.raises(Misconfigured, match=r"endpoints\.json can't be read"):
        Client(datastore="mezzanine")
