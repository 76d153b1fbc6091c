"""The table of raw requests: what is sent, what is answered, whether the connection goes on in step, what is stored.

`@` in a row stands for the path of a row key that is that row's alone, and `length: #` for the size of what follows the
first head. tests/raw_connection.py sends them, and another request behind each, which must be answered rightly, or not
at all.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass

BODY = b'{"fare": 12}'
SIZE = b"content-length: 12\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n"
CHUNKS = b'6\r\n{"fare\r\n6\r\n": 12}\r\n0\r\n\r\n'
HOST = b"host: localhost\r\n"
H2C = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUA\r\n"
WEBSOCKET = (
    b"connection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
    b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)
CONTINUE = b"expect: 100-continue\r\n"


@dataclass(frozen=True)
class Row:
    """`answer` is the status of the first response, 0 where the connection is closed without one. `behind` are those of
    the further requests in the row. `ends`: nothing behind it is answered. `stored`: the cell is there afterwards.
    `is_open`: it ends within a request, so nothing can be sent behind it.
    """

    name: str
    answer: int
    pieces: tuple[bytes, ...]
    ends: bool
    stored: bool
    behind: tuple[int, ...]
    half_close: bool
    is_open: bool

    @property
    def method(self) -> str:
        return self.pieces[0].lstrip(b"\r\n").split(b" ")[0].decode("latin-1")


def row(
    name: str,
    answer: int,
    *pieces: bytes,
    ends: bool = False,
    stored: bool | None = None,
    behind: tuple[int, ...] = (),
    half_close: bool = False,
    is_open: bool = False,
) -> Row:
    stored = answer == 201 if stored is None else stored
    return Row(name, answer, pieces, ends, stored, behind, half_close, is_open)


def request(line: bytes, *fields: bytes, version: bytes = b"1.1", host: bytes = HOST, body: bytes = b"") -> bytes:
    return b"%b HTTP/%b\r\n%b%b\r\n%b" % (line, version, host, b"".join(fields), body)


def put(*fields: bytes, body: bytes = BODY, path: bytes = b"@/BASE/1", **more: bytes) -> bytes:
    return request(b"PUT " + path, *fields, body=body, **more)


def get(*fields: bytes, path: bytes = b"/healthz", **more: bytes) -> bytes:
    return request(b"GET " + path, *fields, **more)


def rows() -> Iterator[Row]:
    yield from _ordinary()
    yield from _offers()
    yield from _refused_early()
    yield from _payload_framing()
    yield from _connections()
    yield from _version_1_0()
    yield from _half_closed()
    yield from _targets()
    yield from _hosts()
    yield from _heads()
    yield from _behind_another()


def _ordinary() -> Iterator[Row]:
    yield row("put", 201, put(SIZE))
    yield row("put, head and body apart", 201, put(SIZE, body=b""), BODY)
    yield row("put, in small pieces", 201, *_split(put(SIZE), 11))
    yield row("put, chunked", 201, put(CHUNKED, body=CHUNKS))
    yield row("put, chunked, in pieces", 201, put(CHUNKED, body=b""), CHUNKS[:3], CHUNKS[3:12], CHUNKS[12:])
    yield row("post", 201, request(b"POST @/BASE", SIZE, body=BODY))
    yield row("put of an empty body", 400, put(b"content-length: 0\r\n", body=b""))
    yield row("put without a length", 400, put(body=b""))
    yield row("get", 200, get())
    yield row("get with a payload", 200, get(b"content-length: 2\r\n") + b"{}")
    yield row("get with a chunked payload", 200, get(CHUNKED) + CHUNKS)
    yield row("head", 200, request(b"HEAD /healthz"))
    yield row("head of nothing", 404, request(b"HEAD /nothing"))
    yield row("head of a cell that isn't there", 404, request(b"HEAD @/BASE/1"))
    yield row("options of a path", 405, request(b"OPTIONS /healthz"))
    yield row("options of the server", 404, request(b"OPTIONS *"))
    yield row("delete of a cell", 405, request(b"DELETE @/BASE/1"))
    yield row("patch", 405, request(b"PATCH @/BASE/1", SIZE, body=BODY))
    yield row("trace", 405, request(b"TRACE /healthz"))
    yield row("a method of WebDAV", 405, request(b"PROPFIND /healthz"))
    yield row("a method that nobody has", 400, request(b"BREW /healthz"), ends=True)
    yield row("a method in lower case", 400, request(b"get /healthz"), ends=True)
    yield row("a put in lower case", 400, request(b"put @/BASE/1", SIZE, body=BODY), ends=True)
    yield row("connect", 400, request(b"CONNECT localhost:443"), ends=True)
    yield row("connect to a path", 400, request(b"CONNECT /healthz"), ends=True)
    yield row("connect with a payload", 400, request(b"CONNECT localhost:443", SIZE, body=BODY), ends=True)
    yield row("the preface of HTTP/2", 400, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", ends=True)
    yield row("TLS", 400, bytes.fromhex("16030100a5010000a10303") + b"\x00" * 40, ends=True)
    yield row("nothing of HTTP", 400, b"hello\r\n\r\n", ends=True)
    yield row("one space", 400, b" GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n", ends=True)


def _offers() -> Iterator[Row]:
    """An offer to speak another protocol. A server may ignore it, and serves the request as any other."""
    for name, offer in {
        "h2c": H2C,
        "h2c without settings": b"connection: upgrade\r\nupgrade: h2c\r\n",
        "a WebSocket": WEBSOCKET,
        "TLS": b"upgrade: TLS/1.0\r\nconnection: Upgrade\r\n",
        "several": b"upgrade: h2c, TLS/1.2, foo/2\r\nconnection: keep-alive, Upgrade\r\n",
        "one that isn't in Connection": b"upgrade: h2c\r\n",
        "a Connection without one": b"connection: Upgrade\r\n",
    }.items():
        yield row(f"offer of {name}: put", 201, put(offer, SIZE))
        yield row(f"offer of {name}: put in two pieces", 201, put(offer, SIZE, body=b""), BODY)
        yield row(f"offer of {name}: put, chunked", 201, put(offer, CHUNKED, body=CHUNKS))
        yield row(f"offer of {name}: get", 200, get(offer))
        yield row(f"offer of {name}: with an expectation", 201, put(offer, SIZE, CONTINUE, body=b""), BODY)
    yield row("offer of h2c: the head in pieces", 201, *_split(put(H2C, SIZE), 40))
    yield row("offer of h2c: empty body", 400, put(H2C, body=b""))
    yield row("offer of h2c: refused put", 422, put(H2C, SIZE, path=b"@/BASE/x"))
    yield row("offer of h2c: head", 200, request(b"HEAD /healthz", H2C))
    yield row("offer of h2c: two behind each other", 201, put(H2C, SIZE) + put(H2C, SIZE) + get(H2C), behind=(200, 200))
    yield row("offer of h2c and close", 201, put(b"connection: Upgrade, close\r\nupgrade: h2c\r\n", SIZE), ends=True)
    yield row("offer of h2c in HTTP/1.0", 201, put(H2C, SIZE, version=b"1.0"), ends=True)
    yield row("offer of h2c, two lengths", 400, put(H2C, SIZE, SIZE), ends=True)
    yield row("offer of h2c, foreign host", 421, get(H2C, host=b"host: evil.example\r\n"))
    yield row("offer of h2c, chunks that are none", 400, put(H2C, CHUNKED, body=b"zz\r\n"), ends=True)


def _refused_early() -> Iterator[Row]:
    """Refused before the payload was read: it is taken for no request."""
    smuggled = b"PUT @/BASE/1 HTTP/1.1\r\nhost: localhost\r\ncontent-length: 12\r\n\r\n" + BODY
    for name, path, length, status in (
        ("a ref_key that is none", b"@/BASE/x", None, 422),
        ("a path that is none", b"/nothing", None, 404),
        ("an unknown datastore", b"/v1/nobodys/cells/" + str(uuid.UUID(int=5)).encode() + b"/BASE/1", None, 404),
        ("too large", b"@/BASE/1", 3 << 20, 413),
        ("a method that the path lacks", b"/healthz", None, 405),
    ):
        announced = b"content-length: %d\r\n" % (length or 12)
        yield row(
            f"{name}: waits for leave", status, put(announced, CONTINUE, path=path, body=b""), ends=True, is_open=True
        )
        if length is None:
            announced = b"content-length: #\r\n"
            yield row(f"{name}: sends all the same", status, put(announced, CONTINUE, path=path, body=smuggled))
            yield row(f"{name}: sends at once", status, put(announced, path=path, body=smuggled))
            yield row(
                f"{name}: sends in pieces", status, put(announced, path=path, body=b""), smuggled[:30], smuggled[30:]
            )
            yield row(f"{name}: chunked", status, put(CHUNKED, path=path, body=CHUNKS))
    yield row("another media type", 415, put(SIZE, b"content-type: text/csv\r\n"))
    yield row(
        "another media type, waits for leave",
        415,
        put(SIZE, CONTINUE, b"content-type: text/csv\r\n", body=b""),
        ends=True,
        is_open=True,
    )
    yield row(
        "foreign host, waits for leave",
        421,
        put(SIZE, CONTINUE, body=b"", host=b"host: evil.example\r\n"),
        ends=True,
        is_open=True,
    )
    yield row("foreign host, sends at once", 421, put(SIZE, host=b"host: evil.example\r\n"))
    long = b" " * ((16 << 20) + 12)
    yield row("longer than what is read of it", 413, put(b"content-length: #\r\n", body=long), ends=True)
    yield row("chunks beyond the bound", 413, put(CHUNKED, body=b"200000\r\n" + b"x" * (2 << 20) + b"\r\n0\r\n\r\n"))


def _payload_framing() -> Iterator[Row]:
    def refused(name: str, *fields: bytes, body: bytes = CHUNKS, status: int = 400) -> Row:
        return row(name, status, put(*fields, body=body), ends=True)

    yield refused("two lengths that agree", SIZE, SIZE, body=BODY)
    yield refused("two lengths that differ", SIZE, b"content-length: 5\r\n", body=BODY)
    yield refused("a list of lengths", b"content-length: 12, 12\r\n", body=BODY)
    for value in (b"-1", b"+12", b"1_2", b"0x0c", b"12.0", b"twelve", b"1 2", b'"12"', b"99999999999999999999999"):
        yield refused(f"length {value.decode()}", b"content-length: %b\r\n" % value, body=BODY)
    yield row("length 012", 201, put(b"content-length: 012\r\n"))
    yield refused("length and chunks", SIZE, CHUNKED)
    yield refused("chunks and length", CHUNKED, SIZE)
    yield refused("chunks twice", CHUNKED, CHUNKED)
    yield refused("chunked, chunked", b"transfer-encoding: chunked, chunked\r\n")
    yield refused("gzip, chunked", b"transfer-encoding: gzip, chunked\r\n", status=501)
    yield refused("chunked, gzip", b"transfer-encoding: chunked, gzip\r\n")
    yield refused("identity", b"transfer-encoding: identity\r\n", status=501)
    yield refused("a coding that nobody has", b"transfer-encoding: xchunked\r\n", status=501)
    yield refused("a blank in the name of the coding", b"transfer-encoding : chunked\r\n")
    yield row("CHUNKED", 201, put(b"Transfer-Encoding: CHUNKED\r\n", body=CHUNKS))
    yield row("a chunk with an extension", 201, put(CHUNKED, body=b'c;a=b;c="d"\r\n' + BODY + b"\r\n0;e\r\n\r\n"))
    yield row("a chunk size in upper case", 201, put(CHUNKED, body=b"C\r\n" + BODY + b"\r\n0\r\n\r\n"))
    yield row("a chunk size with zeros", 201, put(CHUNKED, body=b"000c\r\n" + BODY + b"\r\n000\r\n\r\n"))
    for trailer in (b"x-note: 1", b"authorization: Bearer nobody", b"host: evil.example", b"expect: 100-continue"):
        name = trailer.partition(b":")[0].decode()
        yield row(f"trailer {name}", 201, put(CHUNKED, body=CHUNKS[:-2] + trailer + b"\r\n\r\n"))
        yield row(f"trailer {name} in a piece of its own", 201, put(CHUNKED, body=CHUNKS[:-2]), trailer + b"\r\n\r\n")
    for name, body in {
        "none": b"zz\r\n",
        "negative": b"-1\r\n",
        "with 0x": b"0xc\r\n",
        "empty": b"\r\n",
        "too large": b"f" * 17 + b"\r\n",
        "without its end": b"c\r\n" + BODY + b"0\r\n\r\n",
        "too short": b"5\r\n" + BODY + b"\r\n0\r\n\r\n",
        "with a bare LF": b"c\n" + BODY + b"\n0\n\n",
    }.items():
        yield refused(f"a chunk size that is {name}", CHUNKED, body=body)
    yield refused("a length as a trailer", CHUNKED, body=CHUNKS[:-2] + b"content-length: 5\r\n\r\n")
    yield refused("a trailer that is none", CHUNKED, body=CHUNKS[:-2] + b"no trailer\r\n\r\n")
    endless = put(CHUNKED, body=CHUNKS[:-2] + b"a: " + b"x" * 200000)
    yield row("an endless trailer", 431, endless, ends=True, is_open=True)
    yield row("100-continue", 201, put(SIZE, CONTINUE, body=b""), BODY)
    yield row("100-continue, sends at once", 201, put(SIZE, CONTINUE))
    yield row("100-CONTINUE, chunked", 201, put(CHUNKED, b"Expect: 100-CONTINUE\r\n", body=b""), CHUNKS)
    yield row("100-continue without a payload", 200, get(CONTINUE))
    yield row("another expectation", 201, put(SIZE, b"expect: 200-ok\r\n"))
    yield row("two expectations", 201, put(SIZE, CONTINUE, b"expect: more\r\n"))


def _connections() -> Iterator[Row]:
    for value in (b"close", b"Close", b"keep-alive, close", b"close, foo"):
        yield row(f"connection: {value.decode()}", 201, put(SIZE, b"connection: %b\r\n" % value), ends=True)
    for value in (b"keep-alive", b"Keep-Alive", b"foo", b"", b"closed", b"x-close"):
        yield row(f"connection: {value.decode()}.", 201, put(SIZE, b"connection: %b\r\n" % value))
    yield row(
        "close in a second Connection", 201, put(SIZE, b"connection: keep-alive\r\nconnection: close\r\n"), ends=True
    )
    yield row("proxy-connection", 201, put(SIZE, b"proxy-connection: close\r\n"), ends=True)
    yield row("close of a get", 200, get(b"connection: close\r\n"), ends=True)
    yield row("close of a refused put", 422, put(SIZE, b"connection: close\r\n", path=b"@/BASE/x"), ends=True)


def _version_1_0() -> Iterator[Row]:
    def old(name: str, *pieces: bytes, answer: int) -> Row:
        return row(f"HTTP/1.0: {name}", answer, *pieces, ends=True)

    ten = b"1.0"
    yield old("get", get(version=ten), answer=200)
    yield old("get without a Host", get(version=ten, host=b""), answer=200)
    yield old("get of a foreign host", get(version=ten, host=b"host: evil.example\r\n"), answer=421)
    yield old("keep-alive", get(b"connection: keep-alive\r\n", version=ten), answer=200)
    yield old("put", put(SIZE, version=ten), answer=201)
    yield old("put, keep-alive", put(SIZE, b"connection: keep-alive\r\n", version=ten), answer=201)
    yield old("put in two pieces", put(SIZE, version=ten, body=b""), BODY, answer=201)
    yield old("expectation", put(SIZE, CONTINUE, version=ten), answer=201)
    yield old("chunked put", put(CHUNKED, version=ten, body=CHUNKS), answer=501)
    yield old("head", request(b"HEAD /healthz", version=ten), answer=200)
    yield old("refused put", put(SIZE, version=ten, path=b"@/BASE/x"), answer=422)
    yield old("metrics", get(version=ten, path=b"/metrics"), answer=200)
    yield old("page", get(version=ten, path=b"/docs"), answer=200)
    for version in (b"0.9", b"1.2", b"2.0", b"3.0", b"1", b"1.10", b"11", b"1.x"):
        status = 505 if version in (b"0.9", b"2.0") else 400
        yield row(f"version {version.decode()}", status, get(version=version), ends=True)
        yield row(f"put, version {version.decode()}", status, put(SIZE, version=version), ends=True)
    yield row("no version", 505, b"GET /healthz\r\n\r\n", ends=True)
    yield row("no version, with a header", 505, b"GET /healthz\r\nhost: localhost\r\n\r\n", ends=True)
    yield row("version in lower case", 400, b"GET /healthz http/1.1\r\nhost: localhost\r\n\r\n", ends=True)


def _half_closed() -> Iterator[Row]:
    """The client closes its sending side, and reads."""

    def closed(name: str, *pieces: bytes, answer: int, behind: tuple[int, ...] = ()) -> Row:
        return row(f"half-closed: {name}", answer, *pieces, ends=True, half_close=True, behind=behind)

    yield closed("put", put(SIZE), answer=201)
    yield closed("put in two pieces", put(SIZE, body=b""), BODY, answer=201)
    yield closed("put, chunked", put(CHUNKED, body=CHUNKS), answer=201)
    yield closed("put, connection: close", put(SIZE, b"connection: close\r\n"), answer=201)
    yield closed("put of HTTP/1.0", put(SIZE, version=b"1.0"), answer=201)
    yield closed("put that offers h2c", put(H2C, SIZE), answer=201)
    yield closed("put with an expectation", put(SIZE, CONTINUE), answer=201)
    yield closed("get", get(), answer=200)
    yield closed("get of a page", get(path=b"/docs"), answer=200)
    yield closed("head", request(b"HEAD /healthz"), answer=200)
    yield closed("refused put", put(SIZE, path=b"@/BASE/x"), answer=422)
    yield closed("put and get", put(SIZE) + get(), answer=201, behind=(200,))
    yield closed(
        "put, and a put that is cut off",
        put(SIZE) + put(SIZE, path=b"@/BASE/2", body=BODY[:5]),
        answer=201,
        behind=(400,),
    )
    yield closed("a body that is cut off", put(SIZE, body=BODY[:5]), answer=400)
    yield closed("a body that never begins", put(SIZE, body=b""), answer=400)
    yield closed("a body that waits for leave", put(SIZE, CONTINUE, body=b""), answer=400)
    yield closed("chunks that are cut off", put(CHUNKED, body=CHUNKS[:12]), answer=400)
    yield closed("chunks without the last one", put(CHUNKED, body=CHUNKS[:-5]), answer=400)
    yield closed("chunks without the last line", put(CHUNKED, body=CHUNKS[:-2]), answer=400)
    yield closed("a body that is cut off, in pieces", put(SIZE, body=b""), BODY[:5], answer=400)
    yield closed("a body that is cut off, of an offer", put(H2C, SIZE, body=BODY[:5]), answer=400)
    yield closed("half a head", put(SIZE)[:40], answer=0)
    yield closed("nothing", b"\r\n", answer=0)


def _targets() -> Iterator[Row]:
    for name, path, status in (
        ("a query without anything", b"/healthz?", 200),
        ("two question marks", b"/healthz??", 200),
        ("an unknown parameter", b"/healthz?a=b", 200),
        ("a double slash", b"//healthz", 404),
        ("a slash behind", b"/healthz/", 404),
        ("a dot", b"/./healthz", 404),
        ("two dots", b"/v1/../healthz", 404),
        ("two dots, encoded", b"/v1/%2e%2e/healthz", 404),
        ("two dots and slash, encoded", b"/v1/%2e%2e%2fhealthz", 404),
        ("an encoded letter", b"/%68ealthz", 200),
        ("an encoded slash before", b"/%2fhealthz", 404),
        ("upper case", b"/HEALTHZ", 404),
        ("half an escape", b"/healthz%", 404),
        ("an escape of nothing", b"/%zz", 404),
        ("a NUL", b"/healthz%00", 404),
        ("bytes that are no UTF-8", b"/%ff%fe", 404),
        ("a semicolon", b"/healthz;a=b", 404),
        ("a fragment", b"/healthz#a", 200),
        ("nothing but a query", b"?", 400),
        ("no slash", b"healthz", 400),
        ("a backslash", b"\\healthz", 400),
        ("a blank", b"/health z", 400),
        ("bytes above ASCII", b"/gr\xc3\xb6\xc3\x9fe", 400),
    ):
        goes_on = status != 400
        yield row(f"target: {name}", status, get(path=path), ends=not goes_on)
    for name, path, status in (
        ("ref_key 01", b"@/BASE/01", 422),
        ("ref_key +1", b"@/BASE/+1", 422),
        ("ref_key 1_0", b"@/BASE/1_0", 422),
        ("ref_key with a blank", b"@/BASE/%201", 422),
        ("ref_key in other digits", b"@/BASE/%D9%A1", 422),
        ("ref_key 1.0", b"@/BASE/1.0", 422),
        ("an encoded slash", b"@/BASE%2F1", 405),
        ("an encoded slash in lower case", b"@/BASE%2f1", 405),
        ("an encoded slash, twice encoded", b"@/BASE%252F1", 405),
        ("an encoded slash before the ref_key", b"@%2FBASE/1", 405),
        ("a slash behind", b"@/BASE/1/", 404),
        ("a double slash", b"@//BASE/1", 404),
        ("a query of a put", b"@/BASE/1?x=1", 422),
    ):
        yield row(f"put: {name}", status, put(SIZE, path=path))
    yield row("put: an encoded name", 201, put(SIZE, path=b"@/%42ASE/%31"))
    yield row("target of 60 KB", 404, get(path=b"/" + b"a" * 60000))
    yield row("target of 70 KB", 431, get(path=b"/" + b"a" * 70000), ends=True)
    yield row("query of 70 KB", 431, get(path=b"/healthz?" + b"a" * 70000), ends=True)
    yield row("absolute", 200, get(path=b"http://localhost/healthz"))
    yield row("absolute with a port", 200, get(path=b"http://localhost:80/healthz"))
    yield row("absolute, https", 200, get(path=b"https://localhost/healthz"))
    yield row("absolute, without a path", 200, get(path=b"http://localhost"))
    yield row("absolute, foreign", 421, get(path=b"http://evil.example/healthz"))
    yield row("absolute, foreign behind a user", 421, get(path=b"http://localhost@evil.example/healthz"))
    yield row(
        "absolute, and a foreign Host", 200, get(path=b"http://localhost/healthz", host=b"host: evil.example\r\n")
    )
    yield row("absolute, HTTP/1.0", 421, get(path=b"http://evil.example/healthz", version=b"1.0", host=b""), ends=True)
    yield row("absolute put", 201, put(SIZE, path=b"http://localhost@/BASE/1"))
    yield row("absolute put, foreign", 421, put(SIZE, path=b"http://evil.example@/BASE/1"))


def _hosts() -> Iterator[Row]:
    yield row("no Host", 421, get(host=b""))
    yield row("put without a Host", 421, put(SIZE, host=b""))
    yield row("empty Host", 421, get(host=b"host:\r\n"))
    yield row("two Hosts", 400, get(host=HOST + HOST))
    yield row("two Hosts that differ", 400, put(SIZE, host=HOST + b"host: evil.example\r\n"))
    yield row("an empty Host and another", 400, get(host=b"host:\r\n" + HOST))
    for name, value, status in (
        ("with a port", b"localhost:8000", 200),
        ("in upper case", b"LOCALHOST", 200),
        ("an address", b"127.0.0.1", 200),
        ("an address of six", b"[::1]:80", 200),
        ("foreign", b"evil.example", 421),
        ("one that begins alike", b"localhost.evil.example", 421),
        ("with a user", b"localhost@evil.example", 421),
        ("with a dot", b"localhost.", 421),
        ("with a list", b"localhost, evil.example", 421),
        ("with a path", b"localhost/evil", 421),
        ("with a port that is none", b"localhost:evil", 421),
    ):
        yield row(f"Host {name}", status, get(host=b"host: %b\r\n" % value))


def _heads() -> Iterator[Row]:
    def refused(name: str, head: bytes) -> Row:
        return row(name, 400, head, ends=True)

    yield row("empty lines before", 201, b"\r\n\r\n" + put(SIZE))
    yield row("a bare LF before", 200, b"\n" + get())
    yield refused("bare LF in the request line", b"GET /healthz HTTP/1.1\nhost: localhost\r\n\r\n")
    yield refused("bare LF behind a field", b"GET /healthz HTTP/1.1\r\nhost: localhost\n\r\n")
    yield refused("bare LF at the end", b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\n")
    yield refused("bare CR", b"GET /healthz HTTP/1.1\rhost: localhost\r\n\r\n")
    yield refused("a folded field", get(b"x-note: a\r\n b\r\n"))
    yield refused("a folded field with a tab", get(b"x-note: a\r\n\tb\r\n"))
    yield refused("a folded transfer-encoding", put(b"transfer-encoding:\r\n chunked\r\n", body=CHUNKS))
    yield refused("a blank before the first field", b"GET /healthz HTTP/1.1\r\n host: localhost\r\n\r\n")
    yield refused("a blank before a colon", get(b"x-note : a\r\n"))
    yield refused("a field without a colon", get(b"x-note\r\n"))
    yield refused("a field without a name", get(b": a\r\n"))
    yield refused("a field with a bracket in its name", get(b"x[1]: a\r\n"))
    yield refused("a NUL in a value", get(b"x-note: a\x00b\r\n"))
    yield row("two blanks in the request line", 200, b"GET  /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
    yield refused("a tab in the request line", b"GET\t/healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
    yield row("an empty value", 200, get(b"x-note:\r\n"))
    yield row("blanks around a value", 200, get(b"x-note: \t a \t \r\n"))
    yield row("Latin-1 in a value", 200, get(b"x-note: gr\xf6\xdfe\r\n"))
    yield row("99 fields", 200, get(b"a: b\r\n" * 99))
    yield row("101 fields", 431, get(b"a: b\r\n" * 101), ends=True)
    yield row("a field of 60 KB", 200, get(b"a: " + b"b" * 60000 + b"\r\n"))
    yield row("a field of 70 KB", 431, get(b"a: " + b"b" * 70000 + b"\r\n"), ends=True)


def _behind_another() -> Iterator[Row]:
    """Requests behind each other in one piece are answered in order, each after the one before."""
    yield row("put and its get", 201, put(SIZE) + get(path=b"@/BASE/1"), behind=(200,))
    yield row("put twice", 201, put(SIZE) + put(SIZE), behind=(200,))
    yield row("get, head, get", 200, get() + request(b"HEAD /nothing") + get(), behind=(404, 200))
    yield row("close, and a put behind it", 200, get(b"connection: close\r\n") + put(SIZE), ends=True)
    yield row("HTTP/1.0, and a put behind it", 200, get(version=b"1.0") + put(SIZE), ends=True)
    yield row("put, and what is no request", 201, put(SIZE) + b"hello\r\n\r\n", ends=True)
    yield row("put, and a payload too much", 201, put(SIZE) + BODY, ends=True)
    yield row(
        "two puts, and what is no request", 201, put(SIZE) + put(SIZE) + b"hello\r\n\r\n", ends=True, behind=(200,)
    )
    yield row("get, and a put with bad chunks", 200, get() + put(CHUNKED, body=b"zz\r\n"), ends=True)
    yield row("chunks, and a get", 201, put(CHUNKED, body=CHUNKS) + get(), behind=(200,))
    yield row("refused put, and a put", 422, put(SIZE, path=b"@/BASE/x") + put(SIZE), stored=True, behind=(201,))
    yield row("empty lines between", 200, get() + b"\r\n\r\n" + put(SIZE), stored=True, behind=(201,))
    yield row(
        "a put that waits for leave, behind a get",
        200,
        get() + put(SIZE, CONTINUE, body=b""),
        BODY,
        stored=True,
        behind=(201,),
    )


def _split(sent: bytes, size: int) -> tuple[bytes, ...]:
    return tuple(sent[start : start + size] for start in range(0, len(sent), size))


ROWS = tuple(rows())
