"""Formats: which media type a request is in and which one its answer takes. Nothing that has no JSON gets in (I14)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import msgspec

from schemaless.codec import BODY_BYTES_MAX, DEPTH_MAX, encode_body, parse_json, parse_json_body
from schemaless.errors import Invalid, Malformed, TooLarge, UnsupportedMedia


class Format(msgspec.Struct, frozen=True, eq=False):
    """How one media type is read and written. `parse_body` gives the stored form of a cell's body.

    `encode` writes a whole answer, `encode_one` one item of it: only NDJSON tells them apart. `check` raises Malformed
    for a decoded value that has no JSON.
    """

    media_type: str
    encode: Callable[[Any], bytes]
    encode_one: Callable[[Any], bytes]
    parse: Callable[[bytes], Any]
    parse_body: Callable[[bytes], bytes]
    decoder: Callable[[Any], Any]
    check: Callable[[Any], None]

    @property
    def header(self) -> tuple[bytes, bytes]:
        return (b"content-type", self.media_type.encode())


def check_json_only(value: Any) -> None:
    """Without recursion, as deep as the decoder goes."""
    level = [value]
    while level:
        level = [member for item in level for member in _members(item)]


def _members(item: Any) -> Iterable[Any]:
    if isinstance(item, dict):
        if not all(isinstance(name, str) for name in item):
            raise Malformed("MessagePack maps need keys that are strings")
        return item.values()
    if isinstance(item, list | tuple):
        return item
    if isinstance(item, float) and not math.isfinite(item):
        raise Malformed("NaN and Infinity are no JSON values")
    if item is not None and not isinstance(item, bool | int | float | str):
        raise Malformed("MessagePack bin and ext are no JSON values")
    return ()


def parse_msgpack(raw: bytes) -> Any:
    """Raises Malformed for what is no MessagePack or has no JSON: bin, ext, keys that are no strings, NaN, Infinity."""
    try:
        value = msgspec.msgpack.decode(raw)
    except RecursionError:
        raise Invalid("body", f"is nested more than {DEPTH_MAX} levels deep") from None
    except (msgspec.DecodeError, UnicodeDecodeError, TypeError, ValueError) as error:
        raise Malformed(f"the payload is not valid MessagePack: {error}") from error
    check_json_only(value)
    return value


def parse_msgpack_body(raw: bytes, bytes_max: int = BODY_BYTES_MAX) -> bytes:
    """Stored form of a body that came as MessagePack. Raises TooLarge, Malformed or Invalid."""
    if len(raw) > bytes_max:
        raise TooLarge(f"a body has at most {bytes_max} bytes, this one {len(raw)}")
    return encode_body(parse_msgpack(raw))


def decode(raw: bytes | msgspec.Raw, decoder: Any, field: str) -> Any:
    """Raises Malformed for what is no JSON (or MessagePack), Invalid for what has another shape."""
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise Invalid(field, str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError) as error:
        raise Malformed(f"the payload can't be parsed: {error}") from error


_encode_json = msgspec.json.Encoder().encode
_encode_msgpack = msgspec.msgpack.Encoder().encode


def _encode_lines(values: Iterable[Any]) -> bytes:
    return b"".join(_encode_json(value) + b"\n" for value in values)


_json_decoder = msgspec.json.Decoder


def _has_json(value: Any) -> None:
    """It was JSON."""


JSON = Format("application/json", _encode_json, _encode_json, parse_json, parse_json_body, _json_decoder, _has_json)
NDJSON = Format(
    "application/x-ndjson", _encode_lines, _encode_json, parse_json, parse_json_body, _json_decoder, _has_json
)
MSGPACK = Format(
    "application/msgpack",
    _encode_msgpack,
    _encode_msgpack,
    parse_msgpack,
    parse_msgpack_body,
    msgspec.msgpack.Decoder,
    check_json_only,
)

_ONE = {form.media_type: form for form in (JSON, MSGPACK)}
_BATCH = {form.media_type: form for form in (JSON, MSGPACK, NDJSON)}


EVENTS = "text/event-stream"
_ANYTHING = ("", "*/*", "application/*")


@lru_cache(maxsize=256)
def request_format(content_type: bytes, content_encoding: bytes = b"", *, batch: bool = False) -> Format:
    """What the payload is in; JSON when nothing is said. Raises UnsupportedMedia."""
    known = _BATCH if batch else _ONE
    media_type, _, parameters = content_type.decode("latin-1").lower().partition(";")
    form = known.get(media_type.strip() or JSON.media_type)
    if form is None or not _is_utf8(parameters):
        raise UnsupportedMedia(f"send one of {', '.join(known)}, in UTF-8, not {content_type.decode('latin-1')!r}")
    if content_encoding not in (b"", b"identity"):
        raise UnsupportedMedia(f"send the payload as it is, not in {content_encoding.decode('latin-1')!r}")
    return form


def response_format(accept: bytes, *, batch: bool = False) -> Format:
    """The one of our media types that `Accept` likes best; JSON when it names none of them."""
    if accept in (b"", b"*/*", b"application/json"):
        return JSON
    known = _BATCH if batch else _ONE
    offers = [_offer(part) for part in accept.decode("latin-1").lower().split(",")]
    liked = [(quality, media_type) for media_type, quality in offers if media_type in known and quality > 0]
    best = max(liked, key=lambda pair: pair[0], default=(0.0, JSON.media_type))
    return known[best[1]]


def follow_format(accept: bytes) -> Format | None:
    """Of a call that follows a log: None is the event stream. Raises Invalid when `Accept` names nothing we have."""
    offers = [_offer(part) for part in accept.decode("latin-1").lower().split(",")]
    known = {**_ONE, EVENTS: None, **dict.fromkeys(_ANYTHING, JSON)}
    liked = [(quality, media_type) for media_type, quality in offers if media_type in known and quality > 0]
    if not liked:
        raise Invalid("accept", f"must name one of {', '.join((EVENTS, *_ONE))}")
    return known[max(liked, key=lambda pair: pair[0])[1]]


def _offer(part: str) -> tuple[str, float]:
    media_type, *parameters = (piece.strip() for piece in part.split(";"))
    quality = next((text[2:] for text in parameters if text.startswith("q=")), "1")
    try:
        return media_type, float(quality)
    except ValueError:
        return media_type, 0.0


def _is_utf8(parameters: str) -> bool:
    charsets = [text.strip()[8:].strip('"') for text in parameters.split(";") if text.strip().startswith("charset=")]
    return all(charset in ("utf-8", "utf8") for charset in charsets)
