"""Profiles: named hosts and tokens in a file of the user, for `schemaless --profile NAME`.

A file with tokens that others can read is refused.
"""

from __future__ import annotations

import os
import stat
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from schemaless.errors import Misconfigured


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[prod]` in the file: `hosts = ["https://…"]`, `token = "sl_…"`, `ca = "/path"`, each optional."""

    hosts: tuple[str, ...] = ()
    token: str | None = None
    ca: str | None = None

    def __repr__(self) -> str:
        return f"Profile(hosts={self.hosts})"


def read_profile(file: Path, name: str) -> Profile:
    """Raises Misconfigured: no such file or profile, unknown entries, or a file that others can read."""
    text = read_private_text(file)
    if text is None:
        raise Misconfigured(f"there is no {file}, so there is no profile {name!r}")
    try:
        profiles: dict[str, Any] = tomllib.loads(text)
        return msgspec.convert(profiles[name], Profile)
    except KeyError:
        raise Misconfigured(f"{file} has no profile {name!r}, only {', '.join(profiles) or 'none'}") from None
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise Misconfigured(f"{file}, profile {name!r}: {error}") from error


def read_private_text(file: Path) -> str | None:
    """Returns the text of a file that only its owner can read, or None if there is none. Raises Misconfigured."""
    try:
        with file.open(encoding="utf-8") as opened:
            status = os.fstat(opened.fileno())
            if stat.S_IMODE(status.st_mode) & 0o077 or status.st_uid != os.geteuid():
                raise Misconfigured(
                    f"{file} holds a token, and others may read it: run `chmod 600 {file}` as its owner"
                )
            return opened.read()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise Misconfigured(f"{file} can't be read: {error}") from error
