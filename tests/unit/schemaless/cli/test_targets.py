"""What a process that a command starts is told of the servers."""

import json

import pytest

from schemaless.cli.targets import servers
from schemaless.client.transport import CHOSEN_PROFILE, settings_of
from schemaless.config import StackSettings
from schemaless.runtime.tls import write_private_text
from schemaless.stack.plan import load_or_make_plan


@pytest.fixture(params=[False, True])
def plan(tmp_path, monkeypatch, request):
    """An embedded stack, with or without accounts in Kafka. No server runs."""
    for name in ("SCHEMALESS_TOPOLOGY", "SCHEMALESS_KAFKA", "SCHEMALESS_HOSTS", "SCHEMALESS_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SCHEMALESS_HOME", str(tmp_path))
    made = load_or_make_plan(StackSettings(home=tmp_path, usual_ports=False, kafka_accounts=request.param))
    write_private_text(made.topology_file, json.dumps({"version": 2, "clusters": {}}))
    write_private_text(made.endpoints_file, json.dumps({"api": made.api_urls(), "kafka": made.broker().bootstrap}))
    write_private_text(made.token_file, "sl_stack\n")
    return made


def test_a_worker_is_let_in_by_a_stack_with_accounts_and_tokens(plan, monkeypatch):
    """Its account of Kafka is the services', by the path of a file. Its client finds API and token by itself."""
    told = servers().worker_settings()
    assert ("SCHEMALESS_KAFKA_ACCOUNT" in told) == (plan.kafka_accounts is not None)
    kafka_passwords = plan.kafka_accounts.passwords.values() if plan.kafka_accounts else ()
    secrets = ["sl_stack", plan.accounts.admin_password, plan.accounts.service_password, *kafka_passwords]
    assert not any(secret in value for secret in secrets for value in told.values())
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    settings = settings_of()
    assert list(settings.hosts) == plan.api_urls()
    assert settings.token.get_secret_value() == "sl_stack"


def test_a_worker_has_the_profile_of_its_command(plan):
    """`schemaless --profile prod triggers run` lets the program write to prod."""
    chosen = CHOSEN_PROFILE.set("prod")
    try:
        assert servers().worker_settings()["SCHEMALESS_PROFILE"] == "prod"
    finally:
        CHOSEN_PROFILE.reset(chosen)


def test_a_worker_has_the_stacks_token_also_where_its_hosts_are_named(plan, monkeypatch):
    """They are the stack's. A token of the stack isn't sent to others, and one that is named goes before it."""
    monkeypatch.setenv("SCHEMALESS_HOSTS", plan.api_urls()[0])
    assert servers().worker_settings()["SCHEMALESS_TOKEN_FILE"] == str(plan.token_file)
    monkeypatch.setenv("SCHEMALESS_HOSTS", f"{plan.api_urls()[0]},http://elsewhere:8000")
    assert "SCHEMALESS_TOKEN_FILE" not in servers().worker_settings()
    monkeypatch.delenv("SCHEMALESS_HOSTS")
    monkeypatch.setenv("SCHEMALESS_TOKEN", "sl_mine")
    assert "SCHEMALESS_TOKEN_FILE" not in servers().worker_settings()
