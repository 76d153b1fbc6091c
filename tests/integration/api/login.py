"""An OIDC issuer on loopback, which signs JWTs for tests."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import jwt
from cryptography.hazmat.primitives.asymmetric import ec

AUDIENCE = "schemaless"


@dataclass
class Issuer:
    """`pages` are what it serves. Without them it is away."""

    url: str
    pages: dict[str, object]
    key: ec.EllipticCurvePrivateKey = field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()))

    def __post_init__(self) -> None:
        public = jwt.algorithms.ECAlgorithm.to_jwk(self.key.public_key(), as_dict=True)
        self.pages["/keys"] = {"keys": [public | {"kid": "one", "use": "sig"}]}
        self.pages["/.well-known/openid-configuration"] = {"issuer": self.url, "jwks_uri": f"{self.url}/keys"}

    def signed(self, scope: str, lives_s: float = 60.0) -> str:
        now = time.time()
        claims = {"iss": self.url, "aud": AUDIENCE, "sub": "ada", "iat": now, "exp": now + lives_s, "scope": scope}
        return jwt.encode(claims, self.key, "ES256", {"kid": "one"})


@contextmanager
def running_issuer() -> Iterator[Issuer]:
    pages: dict[str, object] = {}

    class Pages(BaseHTTPRequestHandler):
        def do_GET(self):
            body = json.dumps(pages[self.path]).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Pages) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Issuer(f"http://127.0.0.1:{server.server_port}", pages)
        server.shutdown()
