"""Profiles and token files: what a client and the commands send, and what they refuse to read (I17)."""

import pytest

from schemaless.client.exchange import ClientResponse, error_of
from schemaless.client.transport import CHOSEN_PROFILE, headers_of, settings_of
from schemaless.errors import Forbidden, Misconfigured, TooManyRequests, Unauthenticated


@pytest.fixture
def profiles(tmp_path, monkeypatch):
    file = tmp_path / "profiles.toml"
    file.write_text('[prod]\nhosts = ["https://prod"]\ntoken = "sl_prod"\n[bare]\nhosts = ["https://bare"]\n')
    file.chmod(0o600)
    monkeypatch.setenv("SCHEMALESS_PROFILES", str(file))
    monkeypatch.setenv("SCHEMALESS_HOSTS", "http://environment")
    monkeypatch.setenv("SCHEMALESS_TOKEN", "sl_environment")
    return file


def sent(*arguments):
    settings = settings_of(*arguments)
    return settings.hosts, headers_of(settings).get("authorization")


def test_the_argument_goes_before_the_profile_and_the_profile_before_the_environment(profiles, monkeypatch):
    """The token of the environment is never sent to a profile's hosts."""
    assert sent() == (("http://environment",), "Bearer sl_environment")
    monkeypatch.setenv("SCHEMALESS_PROFILE", "prod")
    assert sent() == (("https://prod",), "Bearer sl_prod")
    assert sent(["http://given"], "sl_given") == (("http://given",), "Bearer sl_given")
    chosen = CHOSEN_PROFILE.set("bare")
    try:
        assert sent() == (("https://bare",), None)
    finally:
        CHOSEN_PROFILE.reset(chosen)


def test_a_file_that_others_can_read_is_refused(profiles, monkeypatch):
    """With the command that closes it."""
    monkeypatch.setenv("SCHEMALESS_PROFILE", "prod")
    for mode in (0o640, 0o604, 0o660):
        profiles.chmod(mode)
        with pytest.raises(Misconfigured, match="chmod 600"):
            settings_of()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[other]", "only other"),
        ("[prod]\npassword = 1", "password"),
        ("[prod", "prod"),
        ('[prod]\nhosts = "x"', "array"),
        ('[prod]\ntoken = "sl_prod"', "prod.*missing required field `hosts`"),
        ('[prod]\ntoken = "sl_prod"\nhosts = []', "prod.*length >= 1.*hosts"),
    ],
)
def test_a_profile_that_is_wrong(profiles, monkeypatch, text, said):
    monkeypatch.setenv("SCHEMALESS_PROFILE", "prod")
    profiles.write_text(text)
    with pytest.raises(Misconfigured, match=said):
        settings_of()


def test_a_token_file(tmp_path, monkeypatch):
    """It may be missing: the embedded stack has one only once access is on."""
    file = tmp_path / "token"
    monkeypatch.setenv("SCHEMALESS_TOKEN_FILE", str(file))
    assert sent()[1] is None
    file.write_text("sl_kept\n")
    file.chmod(0o600)
    assert sent()[1] == "Bearer sl_kept"
    monkeypatch.setenv("SCHEMALESS_TOKEN", "sl_environment")
    assert sent()[1] == "Bearer sl_environment"


@pytest.mark.parametrize(("status", "kind"), [(401, Unauthenticated), (403, Forbidden), (429, TooManyRequests)])
def test_refusals_are_errors_of_their_own(status, kind):
    assert type(error_of(ClientResponse(status, {}, b"{}"))) is kind
