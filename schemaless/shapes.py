"""Shapes that any thread may decode.

What a Struct's fields are msgspec finds out when the Struct is decoded for the first time. Two threads that do so at
once end the process by a segmentation fault (msgspec 0.22). A decoder that a module makes at its import is safe.
"""

import threading
from typing import TypeVar

import msgspec

T = TypeVar("T")

_met: set[object] = set()
_meeting = threading.Lock()


def shape(kind: type[T]) -> type[T]:
    """Returns a kind, such as a Struct or a dict of them, that msgspec may decode in several threads from now on."""
    if kind not in _met:
        with _meeting:
            msgspec.msgpack.Decoder(kind)
        _met.add(kind)
    return kind
