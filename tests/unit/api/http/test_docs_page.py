"""/docs comes from this process alone: no network is needed, and no third party's script runs on the API's origin."""

import re
from types import SimpleNamespace

import httpx
import pytest

from api.access.admission import Admission
from api.access.known_tokens import KnownTokens
from api.app import create_app
from api.http.budget import RequestsInFlight
from api.metrics import Metrics
from schemaless.access import issue, now_us
from schemaless.config import ApiSettings


@pytest.fixture
def open_app(tmp_path):
    """Makes an application, with one token if access is on."""
    topology = tmp_path / "topology.json"
    topology.write_text('{"version": 2, "clusters": {}}')

    def make(*issued, **given):
        settings = ApiSettings(topology=topology, kafka="127.0.0.1:9", **given)
        tokens = KnownTokens(None)
        tokens.learn(issued)
        app = create_app(settings)
        app.api_state = SimpleNamespace(
            in_flight=RequestsInFlight(), metrics=Metrics(), tokens=tokens, admission=Admission(settings, tokens)
        )
        return app

    return make


async def ask(app, path, root_path=""):
    transport = httpx.ASGITransport(app, root_path=root_path)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        return await client.get(root_path + path)


async def test_everything_that_the_page_loads_is_served_here(open_app):
    """Its policy lets a browser load nothing else."""
    app = open_app()
    page = await ask(app, "/docs")
    loaded = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert {path.partition("?")[0].rpartition("/")[2] for path in loaded} == {
        "swagger-ui-bundle.js",
        "swagger-ui.css",
        "favicon.png",
    }
    assert "http://" not in page.text
    assert "https://" not in page.text
    for path in loaded:
        served = await ask(app, path)
        assert (served.status_code, served.headers["x-content-type-options"]) == (200, "nosniff")
    assert "'/openapi.json'" in page.text
    policy = dict(part.split(" ", 1) for part in page.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == "'self' 'unsafe-inline'"
    for path in ("/docs/files/../app.py", "/docs/files/%2e%2e/core.py", "/docs/files/"):
        assert (await ask(app, path)).status_code == 404


async def test_the_files_are_as_public_as_the_page(open_app):
    """A page that a browser may see without a token would be empty without them."""
    _, token = issue("one", ["*"], "read", "1h", now_us())
    closed, public = open_app(token), open_app(token, public_paths=("/docs", "/openapi.json"))
    for path in ("/docs", "/docs/files/swagger-ui.css"):
        assert (await ask(closed, path)).status_code == 401
        assert (await ask(public, path)).status_code == 200
    assert (await ask(public, "/docs/filesystem")).status_code == 401
