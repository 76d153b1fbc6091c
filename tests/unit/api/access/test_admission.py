"""I17: every call needs a token of its scope and datastore, whatever the route, and the same place decides for all."""

import asyncio
import inspect
import secrets
from types import SimpleNamespace

import msgspec
import pytest

from api.access import known_tokens
from api.access.admission import Admission, refuse_open_port, scope_of_other
from api.access.known_tokens import WAITING_MAX, KnownTokens
from api.routes import ROUTES
from schemaless.access import Scope, digest_of, either, issue
from schemaless.config import ApiSettings
from schemaless.errors import (
    Forbidden,
    ForeignOrigin,
    Malformed,
    Misconfigured,
    Misdirected,
    SchemalessError,
    TooManyRequests,
    Unauthenticated,
    Unavailable,
)
from schemaless.storage.failover import Answers
from schemaless.storage.token_table import KEPT_AFTER_EXPIRY_S

NOW = 1_800_000_000_000_000
PUBLIC = ("/healthz", "/readyz", "/ui", "/ui/files/{file}")


class Clock:
    now = NOW

    def __call__(self):
        return self.now


def settings(**given):
    return ApiSettings(topology="topology.json", kafka="127.0.0.1:9", **given)


def issued(scope="admin", datastores=("*",), lifetime="1h", name="one"):
    return issue(name, datastores, scope, lifetime, NOW)


def known(*tokens, clock=None):
    found = KnownTokens(None, clock=clock or Clock())
    found.learn(tokens)
    return found


def request(secret=None, *, method="GET", host=b"127.0.0.1:8000", server="127.0.0.1", headers=()):
    given = [*headers]
    if host is not None:
        given.append((b"host", host))
    if secret is not None:
        given.append((b"authorization", b"Bearer " + secret.encode()))
    return {"method": method, "headers": given, "server": (server, 8000), "client": ("127.0.0.1", 1), "scheme": "http"}


async def outcome(asked):
    """Returns the class of the error, or None."""
    try:
        await asked
    except SchemalessError as error:
        return type(error)
    return None


def path_of(route, datastore):
    return route.path.replace("{datastore}", datastore)


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
async def test_each_route_with_each_scope_and_datastore(route):
    """A token is let in exactly where its scope includes the route's and it was issued for the datastore."""
    path = path_of(route, "trips")
    of_datastore = "{datastore}" in route.path
    for scope in Scope:
        for reach in (("trips",), ("other",), ("*",), ("other", "trips")):
            secret, token = issued(scope, reach)
            admission = Admission(settings(), known(token))
            may = path in PUBLIC or (scope.includes(route.scope) and (not of_datastore or reach != ("other",)))
            asked = admission.admit(request(secret), path, route.scope, "trips" if of_datastore else None)
            if may:
                assert await asked in (token, None)
            else:
                with pytest.raises(Forbidden):
                    await asked


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
async def test_each_route_without_a_valid_token(route):
    """As soon as a token exists, only the public paths are served without one, on loopback too."""
    _, token = issued()
    admission = Admission(settings(), known(token))
    for secret in (None, "sl_" + secrets.token_urlsafe(32), token.name, token.digest.hex()):
        asked = admission.admit(request(secret), route.path, route.scope, None)
        if route.path in PUBLIC:
            assert await asked is None
        else:
            with pytest.raises(Unauthenticated) as error:
                await asked
            assert error.value.headers[0][0] == b"www-authenticate"


def test_what_writes_needs_more_than_read():
    """No route that changes cells, indexes, programs or tokens is open to `read`."""
    reading = {("POST", "/v1/{datastore}/batch/get"), ("POST", "/v1/{datastore}/shards/cells")}
    for route in ROUTES:
        reads = route.method == "GET" or (route.method, route.path) in reading
        assert reads == (route.scope is Scope.READ) or "/tokens" in route.path, route.path
        administers = any(part in route.path for part in ("/indexes", "/triggers", "/tokens")) and not reads
        assert not administers or route.scope is Scope.ADMIN, route.path
        assert inspect.iscoroutinefunction(route.handler)


@pytest.mark.parametrize(
    ("path", "method", "needed"),
    [
        ("/docs", "GET", (Scope.READ, None)),
        ("/openapi.json", "GET", (Scope.READ, None)),
        ("/hello", "GET", (Scope.READ, "*")),
        ("/hello", "POST", (Scope.WRITE, "*")),
        ("/v1/trips/hello", "GET", (Scope.READ, "trips")),
        ("/v1/trips/hello", "DELETE", (Scope.WRITE, "trips")),
        ("/v1/trips", "GET", (Scope.READ, "*")),
    ],
)
def test_routes_that_a_user_adds(path, method, needed):
    """Nobody knows what they reach, so they need a token for all datastores unless their path names one."""
    assert scope_of_other(path, method) == needed


async def test_a_token_for_one_datastore_reads_no_route_of_a_user():
    secret, token = issued("admin", ("trips",))
    admission = Admission(settings(), known(token))
    with pytest.raises(Forbidden, match="everything"):
        await admission.admit(request(secret), "/hello", *scope_of_other("/hello", "GET"))


async def test_a_token_ends_with_its_expiry_and_its_revocation():
    clock = Clock()
    secret, token = issued(lifetime="1h")
    tokens = known(token, clock=clock)
    admission = Admission(settings(), tokens)
    assert await admission.admit(request(secret), "/x", Scope.READ, "trips") == token
    assert tokens.hold(token)
    clock.now = token.expires_at
    assert not tokens.hold(token)
    with pytest.raises(Unauthenticated, match="expired"):
        await admission.admit(request(secret), "/x", Scope.READ, "trips")
    clock.now = NOW + 2
    tokens.learn([msgspec.structs.replace(token, revoked_at=NOW + 1)])
    assert not tokens.hold(token)
    with pytest.raises(Unauthenticated, match="revoked"):
        await admission.admit(request(secret), "/x", Scope.READ, "trips")


async def test_a_returning_cluster_brings_no_token_back():
    """A process keeps a revocation that it saw, whatever a cluster shows that was away."""
    secret, token = issued()
    tokens = known(msgspec.structs.replace(token, revoked_at=NOW - 1))
    tokens.learn([token])
    with pytest.raises(Unauthenticated, match="revoked"):
        await Admission(settings(), tokens).admit(request(secret), "/x", Scope.READ, "trips")
    assert either(token, msgspec.structs.replace(token, revoked_at=5)).revoked_at == 5


async def test_access_never_goes_off_again():
    """The last token was revoked, and later its row is gone everywhere: nobody gets in without one."""
    _, token = issued()
    tokens = known(msgspec.structs.replace(token, revoked_at=NOW - 1))
    tokens.learn([])
    with pytest.raises(Unauthenticated):
        await Admission(settings(), tokens).admit(request(), "/x", Scope.READ, "trips")


async def test_what_no_cluster_keeps_is_dropped():
    """A process would write it again for ever. It still knows that access is on."""
    clock = Clock()
    _, token = issued(lifetime="1h")
    tokens = known(token, clock=clock)
    clock.now = token.expires_at + (KEPT_AFTER_EXPIRY_S + 1) * 1_000_000
    tokens.learn([])
    assert not tokens._by_digest
    assert tokens.exist


async def test_who_came_without_a_token_is_held_until_there_is_one():
    tokens = known()
    assert tokens.hold(None)
    tokens.learn([issued()[1]])
    assert not tokens.hold(None)


async def test_without_any_token_loopback_alone_is_served():
    admission = Admission(settings(), known())
    assert await admission.admit(request(), "/x", Scope.ADMIN, "trips") is None
    assert await admission.admit(request(server="::1", host=b"[::1]:8000"), "/x", Scope.ADMIN, "trips") is None
    with pytest.raises(Unauthenticated, match="only loopback"):
        await admission.admit(request(server="10.0.0.7", host=b"10.0.0.7"), "/x", Scope.READ, "trips")
    open_to_all = Admission(settings(host="0.0.0.0"), known())
    with pytest.raises(Unauthenticated, match="only loopback"):
        await open_to_all.admit(request(), "/x", Scope.READ, "trips")


async def test_nobody_gets_in_before_the_tokens_were_read():
    with pytest.raises(Unavailable):
        await Admission(settings(), KnownTokens(None)).admit(request(), "/x", Scope.READ, "trips")


@pytest.fixture
def two_clusters(monkeypatch):
    """Tokens of two clusters, of which `found` answer."""
    answers = Answers()

    async def read(storage):
        return answers

    async def write(storage, answers, known):
        pass

    monkeypatch.setattr(known_tokens, "read_tokens", read)
    monkeypatch.setattr(known_tokens, "bring_up_to_date", write)
    storage = SimpleNamespace(topology=SimpleNamespace(clusters={"a": None, "b": None}))
    return KnownTokens(storage, clock=Clock()), answers


async def test_a_cluster_that_knows_no_token_doesnt_speak_for_the_others(two_clusters):
    """It may be new. Once each has said that it has none, one that is away keeps nobody out."""
    tokens, answers = two_clusters
    admission = Admission(settings(), tokens)
    answers.found = {"b": {}}
    await tokens.refresh()
    with pytest.raises(Unavailable, match="not every cluster"):
        await admission.admit(request(), "/x", Scope.READ, "trips")
    refuse_open_port("0.0.0.0", tokens)  # it serves nobody until it knows
    answers.found = {"a": {}}
    await tokens.refresh()
    assert await admission.admit(request(), "/x", Scope.READ, "trips") is None
    answers.found = {}
    await tokens.refresh()
    assert await admission.admit(request(), "/x", Scope.READ, "trips") is None


async def test_a_token_that_one_cluster_shows_is_enough(two_clusters):
    """Whatever is away, its caller is served."""
    tokens, answers = two_clusters
    secret, token = issued()
    answers.found = {"a": {token.digest: token}}
    await tokens.refresh()
    assert await Admission(settings(), tokens).admit(request(secret), "/x", Scope.READ, "trips") == token


def test_no_port_is_opened_to_a_network_without_a_token():
    for host in ("0.0.0.0", "::", "10.0.0.7", "api-0"):
        with pytest.raises(Misconfigured, match="schemaless token create"):
            refuse_open_port(host, known())
        refuse_open_port(host, known(issued()[1]))
    for host in ("127.0.0.1", "::1", "localhost", "127.0.0.2"):
        refuse_open_port(host, known())


@pytest.mark.parametrize(
    "headers",
    [
        [(b"authorization", b"Basic c2w6")],
        [(b"authorization", b"Bearer")],
        [(b"authorization", b"Bearer ")],
        [(b"authorization", b"SECRET")],
        [(b"cookie", b"token=SECRET")],
        [(b"x-api-key", b"SECRET")],
        [(b"authorization", b"Bearer SECRET"), (b"authorization", b"Bearer SECRET")],
        [(b"authorization", b"Bearer SECRET, Bearer SECRET")],
    ],
)
async def test_a_token_is_in_one_header_or_nowhere(headers):
    secret, token = issued()
    given = [(name, value.replace(b"SECRET", secret.encode())) for name, value in headers]
    with pytest.raises(Unauthenticated):
        await Admission(settings(), known(token)).admit(request(headers=given), "/x", Scope.READ, "trips")


@pytest.mark.parametrize("host", [b"evil.example", b"evil.example:8000", b"127.0.0.1.evil.example", b"", b"10.0.0.7"])
async def test_a_foreign_host_is_refused(host):
    """DNS rebinding: a page's own name leads here. An HTTP/1.0 request without Host is from no browser."""
    admission = Admission(settings(), known())
    if not host:
        await admission.admit(request(host=None), "/x", Scope.READ, "trips")
        return
    with pytest.raises(Misdirected):
        await admission.admit(request(host=host), "/healthz", Scope.READ, None)


async def test_configured_hosts():
    admission = Admission(settings(hosts=("api-0",)), known())
    for host in (b"API-0:8000", b"localhost", b"LOCALHOST:1", b"[::1]:8000", b"127.0.0.1"):
        assert await admission.admit(request(host=host), "/x", Scope.READ, "trips") is None
    assert await Admission(settings(hosts=("*",)), known()).admit(request(host=b"any"), "/x", Scope.READ, "t") is None
    with pytest.raises(Malformed):
        await admission.admit(request(headers=[(b"host", b"localhost")]), "/x", Scope.READ, "trips")


@pytest.mark.parametrize("origin", [b"http://evil.example", b"null", b"https://127.0.0.1:8000", b"http://127.0.0.1:1"])
async def test_a_page_of_another_origin_cannot_write(origin):
    admission = Admission(settings(origins=("https://console.example",)), known())
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        with pytest.raises(ForeignOrigin):
            await admission.admit(request(method=method, headers=[(b"origin", origin)]), "/x", Scope.WRITE, "trips")
        for own in (b"http://127.0.0.1:8000", b"https://console.example"):
            await admission.admit(request(method=method, headers=[(b"origin", own)]), "/x", Scope.WRITE, "trips")
    assert await admission.admit(request(headers=[(b"origin", origin)]), "/x", Scope.READ, "trips") is None


@pytest.mark.parametrize(("scheme", "foreign"), [("http", "https"), ("https", "http")])
async def test_the_scheme_belongs_to_an_origin(scheme, foreign):
    """Whoever can change what a network carries makes http pages of this host, also where it is served over TLS."""
    admission = Admission(settings(), known())

    def admitted(of_page):
        asked = request(method="PUT", headers=[(b"origin", f"{of_page}://127.0.0.1:8000".encode())])
        return outcome(admission.admit({**asked, "scheme": scheme}, "/x", Scope.WRITE, "trips"))

    assert await admitted(scheme) is None
    assert await admitted(foreign) is ForeignOrigin


async def test_rates_are_counted_for_each_token():
    """One token's flood takes nothing from another one. The public paths are not counted."""
    (loud, one), (quiet, two) = issued(name="one"), issued(name="two")
    admission = Admission(settings(requests_per_second_max=5), known(one, two))
    answers = [await outcome(admission.admit(request(loud), "/x", Scope.READ, "trips")) for _ in range(100)]
    assert 5 <= answers.count(None) <= 7
    assert answers[-1] is TooManyRequests
    await admission.admit(request(quiet), "/x", Scope.READ, "trips")
    for _ in range(100):
        await admission.admit(request(), "/healthz", Scope.READ, None)


async def test_unknown_tokens_are_looked_for_together_and_seldom(monkeypatch):
    """A stranger's flood costs the servers five questions a second."""
    read, slept = [], []

    async def read_tokens(storage):
        read.append(1)
        answers = Answers()
        answers.found = {"a": {}}
        return answers

    async def nothing(*arguments):
        pass

    async def sleep(delay):
        slept.append(delay)

    monkeypatch.setattr(known_tokens, "read_tokens", read_tokens)
    monkeypatch.setattr(known_tokens, "bring_up_to_date", nothing)
    tokens = KnownTokens(SimpleNamespace(topology=SimpleNamespace(clusters=())))
    strangers = [secrets.token_urlsafe(32).encode() for _ in range(20)]
    answers = await asyncio.gather(*(tokens.find(one) for one in strangers), return_exceptions=True)
    assert {type(answer) for answer in answers} == {Unauthenticated}
    assert len(read) == 1
    monkeypatch.setattr(known_tokens.asyncio, "sleep", sleep)
    assert await outcome(tokens.find(strangers[0])) is Unauthenticated
    assert len(read) == 2
    assert 0 < slept[-1] <= known_tokens.UNKNOWN_PAUSE_S


async def test_unknown_tokens_wait_in_a_bounded_number():
    """A stranger's flood holds no more requests than that, and those with known tokens don't wait."""
    (secret, token), (stranger, _) = issued(), issued()
    tokens = known(token)
    async with tokens._refreshing:
        waiting = [asyncio.ensure_future(tokens.find(stranger.encode())) for _ in range(WAITING_MAX)]
        await asyncio.sleep(0)
        with pytest.raises(Unavailable):
            await tokens.find(stranger.encode())
        assert await tokens.find(secret.encode()) == token
    assert {type(answer) for answer in await asyncio.gather(*waiting, return_exceptions=True)} == {Unauthenticated}


async def test_without_tokens_rates_are_counted_for_each_address():
    """But not behind a proxy, where one address is everybody (A27)."""
    for behind_proxy, refused in ((False, TooManyRequests), (True, None)):
        admission = Admission(settings(requests_per_second_max=1, behind_proxy=behind_proxy), known())
        answers = [await outcome(admission.admit(request(), "/x", Scope.READ, "trips")) for _ in range(5)]
        assert answers[-1] is refused


def test_only_the_digest_is_kept():
    secret, token = issued()
    assert len(secret) == len("sl_") + 43
    assert token.digest == digest_of(secret.encode())
    assert secret not in repr(token)
    assert issued()[0] != secret


def test_a_token_makes_none_that_reaches_further():
    assert issued("admin", ("*",))[1].covers(issued("admin", ("trips",))[1])
    assert not issued("admin", ("trips",))[1].covers(issued("read", ("*",))[1])
    assert not issued("admin", ("trips",))[1].covers(issued("read", ("trips", "other"))[1])
    assert not issued("write", ("*",))[1].covers(issued("admin", ("trips",))[1])
