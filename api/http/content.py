"""Format: the media type of a request, and the one of its response. Values that JSON can't represent are rejected."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import chain, compress
from typing import Any

import msgspec

from schemaless.codec import (
    BODY_BYTES_MAX,
    CONTAINERS_MAX,
    DEPTH_MAX,
    check_containers,
    check_depth,
    encode_body,
    json_fault,
    parse_json,
    parse_json_body,
)
from schemaless.errors import Invalid, Malformed, TooLarge, UnsupportedMedia


class Format(msgspec.Struct, frozen=True, eq=False):
    """How one media type is read and written. `parse_body` returns the stored form of a cell's body, whose arrays and
    objects `count_first` has counted: in pieces, between which others have their turn.

    `encode` writes a whole response, `encode_one` one item of it: they differ for NDJSON only. `check` raises Malformed
    for a decoded value that JSON can't represent.
    """

    media_type: str
    encode: Callable[[Any], bytes]
    encode_one: Callable[[Any], bytes]
    parse: Callable[[bytes], Any]
    parse_body: Callable[[bytes], bytes]
    count_first: Callable[[bytes], Iterable[None]]
    decoder: Callable[[Any], Any]
    check: Callable[[Any], object]

    @property
    def header(self) -> tuple[bytes, bytes]:
        return (b"content-type", self.media_type.encode())


_NUMBERS_AND_TEXTS = frozenset((type(None), bool, int, str))
_CONTAINERS = frozenset((dict, list, tuple))
_TEXT, _FLOAT = frozenset((str,)), frozenset((float,))


def check_json_only(value: Any) -> int:
    """Looks at every level without recursion, as deep as the decoder goes, and returns how many there are.

    A level is looked at as a whole, at C's speed: a call for each of 50,000 containers would hold the loop for 50 ms.
    Raises Malformed for what JSON can't represent, and Invalid for more arrays and objects than a body may have.
    """
    level: list[Any] = [(value,)]
    depth = count = -1  # the tuple around the value is none of its own
    while level:
        depth += 1
        count += len(level)
        check_containers(count)
        objects = [container for container in level if type(container) is dict]
        if not set(map(type, chain.from_iterable(objects))) <= _TEXT:
            raise Malformed("MessagePack maps need keys that are strings")
        members = [container.values() if type(container) is dict else container for container in level]
        level = _containers_among(list(chain.from_iterable(members)))
    return depth


def _containers_among(members: list[Any]) -> list[Any]:
    kinds = set(map(type, members)) - _NUMBERS_AND_TEXTS
    if float in kinds and not all(map(math.isfinite, compress(members, map(_FLOAT.__contains__, map(type, members))))):
        raise Malformed("NaN and Infinity are no JSON values")
    if kinds - _CONTAINERS - {float}:
        raise Malformed("MessagePack bin and ext are no JSON values")
    return list(compress(members, map(_CONTAINERS.__contains__, map(type, members)))) if kinds - {float} else []


def parse_msgpack(raw: bytes) -> Any:
    """Raises Malformed for what is no MessagePack, and for what JSON can't represent: bin, ext, keys that are no
    strings, NaN, Infinity.
    """
    for _ in count_msgpack(raw):
        pass
    value = _decode_msgpack(raw)
    check_json_only(value)
    return value


def _decode_msgpack(raw: bytes) -> Any:
    try:
        return msgspec.msgpack.decode(raw)
    except RecursionError:
        raise Invalid("body", f"is nested more than {DEPTH_MAX} levels deep") from None
    except (msgspec.DecodeError, UnicodeDecodeError, TypeError, ValueError) as error:
        raise Malformed(f"the payload is not valid MessagePack: {error}") from error


def parse_msgpack_body(raw: bytes) -> bytes:
    """Returns the stored form of a body that came as MessagePack. Raises Malformed or Invalid."""
    value = _decode_msgpack(raw)
    check_depth(check_json_only(value))
    return encode_body(value, check_shape=False)


_CONTAINER_BYTES = bytes((*range(0x80, 0xA0), *range(0xDC, 0xE0)))
_TEXT_LENGTH_BYTES = {0xD9: 1, 0xDA: 2, 0xDB: 4, 0xC4: 1, 0xC5: 2, 0xC6: 4}
_TOKEN_BYTES = (
    *([1] * 0xA0),
    *range(1, 33),  # short texts
    *(1, 1, 1, 1, 0, 0, 0, 2, 3, 5, 5, 9, 2, 3, 5, 9, 2, 3, 5, 9, 3, 4, 6, 10, 18, 0, 0, 0, 3, 5, 3, 5),
    *([1] * 0x20),
)
"""By the first byte of a value: its bytes, those of an array or object without its members. 0: it names its length."""


_COUNTED_BYTES = 64 << 10
"""How much is counted without a pause: at worst a value for each byte, and some milliseconds."""


def count_msgpack(raw: bytes) -> Iterator[None]:
    """Raises Invalid for more arrays and objects than a body may have, before a decoder makes them.

    It yields between pieces of work. What is too large for a body isn't counted.
    """
    if len(raw) - len(raw.translate(None, _CONTAINER_BYTES)) <= CONTAINERS_MAX or len(raw) > BODY_BYTES_MAX:
        return
    at = count = 0
    while at < len(raw):  # some of those bytes may stand in texts and numbers
        end = min(len(raw), at + _COUNTED_BYTES)
        while at < end:
            first = raw[at]
            step = _TOKEN_BYTES[first]
            if step:
                at += step
                if 0x80 <= first < 0xA0 or 0xDC <= first < 0xE0:
                    count += 1
                    if count > CONTAINERS_MAX:
                        check_containers(count)
            else:  # what can't be parsed ends the count: the decoder says so
                width = _TEXT_LENGTH_BYTES.get(first, len(raw))
                at += 1 + width + int.from_bytes(raw[at + 1 : at + 1 + width], "big")
        yield


async def stored_body(raw: bytes, form: Format, bytes_max: int) -> bytes:
    """Returns the stored form of a body. Raises TooLarge, Malformed or Invalid."""
    if len(raw) > bytes_max:
        raise TooLarge(f"a body has at most {bytes_max} bytes, this one {len(raw)}")
    for _ in form.count_first(raw):
        await asyncio.sleep(0)
    return form.parse_body(raw)


def decode(raw: bytes | msgspec.Raw, decoder: Any, field: str) -> Any:
    """Decodes by a decoder of a shape. Raises Malformed for what can't be parsed, Invalid for another shape."""
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise Invalid(field, str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError) as error:
        why = json_fault(bytes(raw), error) if isinstance(decoder, _json_decoder) else str(error)
        raise Malformed(f"the payload can't be parsed: {why}") from error


_encode_json = msgspec.json.Encoder().encode
_encode_msgpack = msgspec.msgpack.Encoder().encode


def _encode_lines(values: Iterable[Any]) -> bytes:
    return b"".join(_encode_json(value) + b"\n" for value in values)


_json_decoder = msgspec.json.Decoder


def _counts_nothing(raw: bytes) -> Iterable[None]:
    """JSON's brackets are counted at C's speed, by `parse_json_body`."""
    return ()


def _has_json(value: Any) -> None:
    """Needs no check: the input was parsed as JSON."""


JSON = Format(
    "application/json",
    _encode_json,
    _encode_json,
    parse_json,
    parse_json_body,
    _counts_nothing,
    _json_decoder,
    _has_json,
)
NDJSON = Format(
    "application/x-ndjson",
    _encode_lines,
    _encode_json,
    parse_json,
    parse_json_body,
    _counts_nothing,
    _json_decoder,
    _has_json,
)
MSGPACK = Format(
    "application/msgpack",
    _encode_msgpack,
    _encode_msgpack,
    parse_msgpack,
    parse_msgpack_body,
    count_msgpack,
    msgspec.msgpack.Decoder,
    check_json_only,
)

_ONE = {form.media_type: form for form in (JSON, MSGPACK)}
_BATCH = {form.media_type: form for form in (JSON, MSGPACK, NDJSON)}


EVENTS = "text/event-stream"
_ANYTHING = ("", "*/*", "application/*")


@lru_cache(maxsize=256)
def request_format(content_type: bytes, content_encoding: bytes = b"", *, batch: bool = False) -> Format:
    """Returns the payload's format: JSON without a Content-Type. Raises UnsupportedMedia."""
    known = _BATCH if batch else _ONE
    media_type, _, parameters = content_type.decode("latin-1").lower().partition(";")
    form = known.get(media_type.strip() or JSON.media_type)
    charsets = [text.strip()[8:].strip('"') for text in parameters.split(";") if text.strip().startswith("charset=")]
    if form is None or any(charset not in ("utf-8", "utf8") for charset in charsets):
        raise UnsupportedMedia(f"send one of {', '.join(known)}, in UTF-8, not {content_type.decode('latin-1')!r}")
    if content_encoding not in (b"", b"identity"):
        raise UnsupportedMedia(f"send the payload as it is, not in {content_encoding.decode('latin-1')!r}")
    return form


def response_format(accept: bytes, *, batch: bool = False) -> Format:
    """Returns the format that `Accept` prefers, JSON when it names none of ours."""
    if accept in (b"", b"*/*", b"application/json"):
        return JSON
    known = _BATCH if batch else _ONE
    offers = [_offer(part) for part in accept.decode("latin-1").lower().split(",")]
    liked = [(quality, media_type) for media_type, quality in offers if media_type in known and quality > 0]
    best = max(liked, key=lambda pair: pair[0], default=(0.0, JSON.media_type))
    return known[best[1]]


def follow_format(accept: bytes) -> Format | None:
    """Returns the format for following a log, None for the event stream. Raises Invalid if we have none of them."""
    offers = [_offer(part) for part in accept.decode("latin-1").lower().split(",")]
    known = {**_ONE, EVENTS: None, **dict.fromkeys(_ANYTHING, JSON)}
    liked = [(quality, media_type) for media_type, quality in offers if media_type in known and quality > 0]
    if not liked:
        raise Invalid("accept", f"must name one of {', '.join((EVENTS, *_ONE))}")
    return known[max(liked, key=lambda pair: pair[0])[1]]


_QUALITY = re.compile(r"0(\.[0-9]{0,3})?|1(\.0{0,3})?")
"""A weight, by RFC 9110."""


def _offer(part: str) -> tuple[str, float]:
    media_type, *parameters = (piece.strip() for piece in part.split(";"))
    quality = next((text[2:] for text in parameters if text.startswith("q=")), "1")
    return media_type, float(quality) if _QUALITY.fullmatch(quality) else 0.0
