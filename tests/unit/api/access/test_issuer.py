"""JWTs of an OIDC issuer: what is believed, for how long, and what a forger achieves (I17)."""

import asyncio
import base64
import hashlib
import hmac
import json
import time

import httpx
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from api.access.admission import Admission
from api.access.issuer import (
    CLOCK_SKEW_S,
    DOCUMENT_BYTES_MAX,
    JWT_BYTES_MAX,
    KEYS_AGE_MAX_S,
    KEYS_MAX,
    RETRY_S,
    WAITING_MAX,
    Issuer,
    IssuerKeys,
    fetch_over,
    issuer_of,
)
from api.access.known_tokens import KnownTokens
from schemaless.access import Scope, issue, now_us, parse_grant
from schemaless.config import ApiSettings
from schemaless.errors import Forbidden, Misconfigured, Unauthenticated, Unavailable

ISSUER = "https://login.example"
AUDIENCE = "schemaless"
RSA_KEYS = [rsa.generate_private_key(public_exponent=65537, key_size=2048) for _ in range(2)]
EC_KEY = ec.generate_private_key(ec.SECP256R1())


def jwk(key, kid, **more):
    algorithm = (
        jwt.algorithms.ECAlgorithm if isinstance(key, ec.EllipticCurvePrivateKey) else jwt.algorithms.RSAAlgorithm
    )
    return {**algorithm.to_jwk(key.public_key(), as_dict=True), "kid": kid, "use": "sig", **more}


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


class Site:
    """An issuer's pages."""

    def __init__(self):
        self.keys = [jwk(RSA_KEYS[0], "one")]
        self.issuer = ISSUER
        self.jwks_uri = f"{ISSUER}/keys"
        self.is_away = False
        self.asked = 0

    async def fetch(self, url):
        self.asked += 1
        if self.is_away:
            raise OSError("no route")
        if url == self.jwks_uri:
            return json.dumps({"keys": self.keys}).encode()
        assert url == f"{ISSUER}/.well-known/openid-configuration"
        return json.dumps({"issuer": self.issuer, "jwks_uri": self.jwks_uri, "more": 1}).encode()


@pytest.fixture
def site():
    return Site()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def issuer(site, clock):
    return Issuer(ISSUER, AUDIENCE, "scope", IssuerKeys(ISSUER, site.fetch, clock=clock))


def claims(**changed):
    now = int(time.time())
    usual = {
        "iss": ISSUER,
        "aud": AUDIENCE,
        "sub": "ada",
        "iat": now,
        "exp": now + 600,
        "scope": "openid schemaless:trips:write",
    }
    return {name: value for name, value in (usual | changed).items() if value is not None}


def signed(key=RSA_KEYS[0], kid="one", algorithm="RS256", headers=None, **changed):
    return jwt.encode(claims(**changed), key, algorithm, {"kid": kid, **(headers or {})}).encode()


def forged(header, payload, sign=lambda signed: b""):
    """A JWT that no library would make."""
    parts = [base64.urlsafe_b64encode(part).rstrip(b"=") for part in (header, payload)]
    return b".".join([*parts, base64.urlsafe_b64encode(sign(b".".join(parts))).rstrip(b"=")])


async def test_a_jwt_allows_what_its_claim_grants(issuer):
    """One token for each scope, the widest first. All JWTs of a subject are one caller."""
    (token,) = await issuer.find(signed())
    assert (token.name, token.scope, token.datastores) == ("ada", Scope.WRITE, ("trips",))
    several = ["schemaless:trips:read", "schemaless:*:read", "schemaless:other:admin", "x", 7]
    wide, narrow = await issuer.find(signed(scope=several))
    assert (wide.scope, wide.datastores) == (Scope.ADMIN, ("other",))
    assert (narrow.scope, narrow.datastores) == (Scope.READ, ("*", "trips"))
    assert wide.digest == narrow.digest == token.digest
    (other,) = await issuer.find(signed(sub="bob"))
    assert other.digest != token.digest


@pytest.mark.parametrize(
    "changed",
    [
        {"iss": "https://other.example"},
        {"iss": ISSUER + "/"},
        {"aud": "other"},
        {"aud": None},
        {"iss": None},
        {"exp": None},
        {"sub": None},
        {"sub": 7},
        {"sub": "\ud800"},
        {"exp": 1_700_000_000},
        {"exp": float("inf")},
        {"exp": "soon"},
        {"nbf": 4_000_000_000},
        {"iat": 4_000_000_000},
        {"scope": None},
        {"scope": "openid trips:write schemaless:trips schemaless:trips:root schemaless:TRIPS:read"},
        {"scope": {"schemaless:trips:write": 1}},
    ],
    ids=str,
)
async def test_other_claims_are_refused(issuer, changed):
    """Each of them, whoever signed it."""
    with pytest.raises(Unauthenticated):
        await issuer.find(signed(**changed))


async def test_a_clock_may_be_a_little_off(issuer):
    """The issuer's, or ours."""
    now = int(time.time())
    await issuer.find(signed(exp=now - CLOCK_SKEW_S + 5))
    await issuer.find(signed(iat=now + CLOCK_SKEW_S - 5, nbf=now + CLOCK_SKEW_S - 5))


async def test_a_verified_jwt_ends_too(site, clock):
    """What was verified once isn't verified again, and still expires."""
    now = time.time()
    issuer = Issuer(ISSUER, AUDIENCE, "scope", IssuerKeys(ISSUER, site.fetch, clock=clock), now=lambda: now)
    secret = signed(exp=int(now) + 100)
    (token,) = await issuer.find(secret)
    now += 100 + CLOCK_SKEW_S + 2
    assert not issuer.holds(token)
    with pytest.raises(Unauthenticated, match="expired"):
        await issuer.find(secret)


def hmac_of(key):
    return lambda text: hmac.digest(key, text, hashlib.sha256)


PUBLIC_PEM = RSA_KEYS[0].public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


@pytest.mark.parametrize(
    "secret",
    [
        lambda body: forged(b'{"alg":"none","kid":"one"}', body),
        lambda body: forged(b'{"alg":"None","kid":"one"}', body),
        lambda body: forged(b'{"kid":"one"}', body),
        lambda body: forged(b'{"alg":"HS256","kid":"one"}', body, hmac_of(PUBLIC_PEM)),
        lambda body: forged(b'{"alg":"HS256","kid":"secret"}', body, hmac_of(b"shared" * 8)),
        lambda body: forged(b'{"alg":"RS256","kid":"one"}', body, lambda text: b"0" * 256),
        lambda body: forged(b'{"alg":"RS256","kid":["one"]}', body),
        lambda body: forged(b'{"alg":"RS256"}', body),
        lambda body: forged(b"[" * 5000, body),
        lambda body: forged(b'{"alg":"RS256","kid":"one","x":' + b"[" * 3000, body),
        lambda body: b"..",
        lambda body: b"\xff.\xff.\xff",
        lambda body: b"a.b.c" + b"d" * JWT_BYTES_MAX,
        lambda body: signed(headers={"crit": ["x"], "x": 1}),
        lambda body: signed(RSA_KEYS[1]),
        lambda body: signed(algorithm="RS512"),
        lambda body: signed(algorithm="PS256"),
        lambda body: signed(kid="weak", key=RSA_KEYS[1]),
        lambda body: signed(kid="cipher", key=RSA_KEYS[1]),
        lambda body: signed().rpartition(b".")[0] + b".",
    ],
)
async def test_forgeries_are_refused(issuer, site, secret):
    """The algorithm is the key's: no header makes a public key the secret of an HMAC, or leaves the signature out."""
    weak = {"kty": "RSA", "kid": "weak", "n": "sXch", "e": "AQAB"}
    site.keys += [
        {"kty": "oct", "kid": "secret", "k": base64.urlsafe_b64encode(b"shared" * 8).decode()},
        weak,
        jwk(RSA_KEYS[1], "cipher", use="enc"),
        {"kty": "new", "kid": "x"},
        {"kid": 7},
    ]
    await issuer.find(signed())
    with pytest.raises(Unauthenticated):
        await issuer.find(secret(json.dumps(claims()).encode()))


async def test_keys_rotate(issuer, site, clock):
    """A new one is read when it is first met. One that the issuer took away ends, also for JWTs that were verified."""
    old, new = signed(), signed(EC_KEY, "two", "ES256")
    await issuer.find(old)
    site.keys.append(jwk(EC_KEY, "two"))
    clock.now += RETRY_S
    (token,) = await issuer.find(new)
    assert token.name == "ada"
    del site.keys[0]
    clock.now += RETRY_S
    await issuer.keys.read_again()
    with pytest.raises(Unauthenticated, match="key"):
        await issuer.find(old)
    await issuer.find(new)
    site.keys[0] = jwk(ec.generate_private_key(ec.SECP256R1()), "two")
    clock.now += RETRY_S
    await issuer.keys.read_again()
    with pytest.raises(Unauthenticated, match="isn't valid"):
        await issuer.find(new)


async def test_unknown_keys_are_asked_for_seldom(issuer, site, clock):
    """However many JWTs name them."""
    await issuer.find(signed())
    clock.now += RETRY_S
    asked = site.asked
    for number in range(100):
        with pytest.raises(Unauthenticated):
            await issuer.find(signed(kid=str(number)))
    assert site.asked == asked + 2  # the two pages, once


async def test_a_jwt_is_short(issuer):
    """Also a valid one: what is verified is bounded (I14)."""
    with pytest.raises(Unauthenticated, match="at most"):
        await issuer.find(signed(more="x" * JWT_BYTES_MAX))


async def test_unknown_keys_wait_in_a_bounded_number(issuer, site):
    """A stranger's flood holds no more requests than that while the issuer hangs."""
    await issuer.find(signed())
    async with issuer.keys._reading:
        waiting = [asyncio.ensure_future(issuer.find(signed(kid=str(n)))) for n in range(WAITING_MAX)]
        await asyncio.sleep(0)
        with pytest.raises(Unavailable):
            await issuer.find(signed(kid="more"))
        await issuer.find(signed())
    assert {type(answer) for answer in await asyncio.gather(*waiting, return_exceptions=True)} == {Unauthenticated}


async def test_so_many_keys_are_kept(issuer, site):
    """Of a set of any size."""
    site.keys = [jwk(RSA_KEYS[0], str(n)) for n in range(KEYS_MAX + 1)]
    await issuer.find(signed(kid=str(KEYS_MAX - 1)))
    with pytest.raises(Unauthenticated, match="key"):
        await issuer.find(signed(kid=str(KEYS_MAX)))


@pytest.mark.parametrize(
    ("answer", "taken"),
    [
        (httpx.Response(200, content=b"{}"), True),
        (httpx.Response(200, content=b"x" * (DOCUMENT_BYTES_MAX + 1)), False),
        (httpx.Response(302, headers={"location": "https://evil.example"}), False),
        (httpx.Response(500), False),
    ],
    ids=["whole", "endless", "redirect", "failed"],
)
async def test_what_is_read_of_an_issuer(answer, taken):
    """A bounded document of the configured address, and nothing of where it points to."""
    asked = []

    def answers(request):
        asked.append(request.url.host)
        return answer

    async with httpx.AsyncClient(transport=httpx.MockTransport(answers)) as client:
        fetch = fetch_over(client)
        if taken:
            assert await fetch(ISSUER) == b"{}"
        else:
            with pytest.raises(OSError):
                await fetch(ISSUER)
    assert asked == ["login.example"]


async def test_an_issuer_that_is_away_harms_nobody_for_an_hour(issuer, site, clock):
    """Its keys still count. Then nobody knows whether they do."""
    await issuer.find(signed())
    site.is_away = True
    clock.now += KEYS_AGE_MAX_S - 1
    await issuer.keys.read_again()
    await issuer.find(signed())
    clock.now += 2
    with pytest.raises(Unavailable):
        await issuer.find(signed())
    site.is_away = False
    clock.now += RETRY_S
    await issuer.keys.read_again()
    await issuer.find(signed())


@pytest.mark.parametrize(
    "wrong",
    [{"is_away": True}, {"issuer": "https://evil.example"}, {"jwks_uri": "http://login.example/keys"}, {"keys": 7}],
    ids=str,
)
async def test_without_its_keys_nobody_is_let_in(issuer, site, wrong):
    """The caller may come again: nothing is wrong with the JWT."""
    for name, value in wrong.items():
        setattr(site, name, value)
    with pytest.raises(Unavailable):
        await issuer.find(signed())


@pytest.mark.parametrize(
    ("issuer_url", "audience"), [(ISSUER, None), (ISSUER, ""), ("http://login.example", "x"), ("login", "x")]
)
def test_settings_that_would_let_in_others_are_refused(issuer_url, audience):
    """Each JWT must be meant for this API, and its keys must come over TLS."""
    with pytest.raises(Misconfigured):
        configured(issuer_url, audience)


def configured(issuer_url, audience="x"):
    return issuer_of(ApiSettings(topology="t.json", kafka="k:1", oidc_issuer=issuer_url, oidc_audience=audience))


async def test_a_proxy_stands_before_issuers_elsewhere_and_not_before_loopback(monkeypatch):
    """Loopback needs no TLS either."""
    asked = []

    async def answer(reader, writer):
        asked.append((await reader.readuntil(b"\r\n\r\n")).partition(b"\r\n")[0])
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        here = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        monkeypatch.setenv("no_proxy", "elsewhere.example")
        monkeypatch.setenv("NO_PROXY", "")
        for name in ("HTTP_PROXY", "HTTPS_PROXY"):
            monkeypatch.setenv(name, here)
        for issuer_url in (ISSUER, here):
            await configured(issuer_url).keys.read_again()
    assert asked == [b"CONNECT login.example:443 HTTP/1.1", b"GET /.well-known/openid-configuration HTTP/1.1"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("ALL_PROXY", "socks5://127.0.0.1:9"), ("HTTPS_PROXY", "ftp://127.0.0.1:9"), ("SSL_CERT_FILE", "/nonexistent")],
)
def test_an_environment_in_which_no_issuer_can_be_asked_is_a_sentence(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(Misconfigured, match=name):
        configured(ISSUER)


@pytest.mark.parametrize("text", ["", "schemaless", "schemaless:a", "schemaless:a:b", "x:a:read", "schemaless::read"])
def test_what_is_no_grant(text):
    """Anything else is somebody else's word."""
    assert parse_grant(text) is None


@pytest.fixture
def admission(issuer):
    settings = ApiSettings(topology="topology.json", kafka="127.0.0.1:9", requests_per_second_max=1)
    tokens = KnownTokens(None)
    tokens.learn([])
    return Admission(settings, tokens, issuer), tokens


def request(secret):
    headers = [(b"host", b"localhost"), *([(b"authorization", b"Bearer " + secret)] if secret else [])]
    return {
        "method": "GET",
        "headers": headers,
        "server": ("127.0.0.1", 1),
        "client": ("127.0.0.1", 1),
        "scheme": "http",
    }


async def test_a_jwt_is_admitted_as_a_token_is(admission):
    """Beside tokens of ours. With an issuer nobody gets in without either, on loopback too."""
    admit, tokens = admission
    with pytest.raises(Unauthenticated):
        await admit.admit(request(b""), "/v1/trips/shards", Scope.READ, "trips")
    token = await admit.admit(request(signed()), "/v1/trips/shards", Scope.WRITE, "trips")
    assert token.name == "ada"
    assert admit.hold(token)
    assert not admit.hold(None)
    for subject, scope, datastore in (("b", Scope.ADMIN, "trips"), ("c", Scope.READ, "other"), ("d", Scope.READ, "*")):
        with pytest.raises(Forbidden):
            await admit.admit(request(signed(sub=subject)), "/", scope, datastore)
    several = signed(sub="e", scope="schemaless:other:admin schemaless:*:read")
    assert (await admit.admit(request(several), "/", Scope.READ, "trips")).scope is Scope.READ
    secret, own = issue("own", ["*"], "read", "1h", now_us())
    tokens.learn([own])
    assert await admit.admit(request(secret.encode()), "/", Scope.READ, "trips") == own
    assert admit.hold(own)
