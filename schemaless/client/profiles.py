"""Profiles: named hosts and tokens in a file of the user, for `schemaless --profile NAME`.

A file with tokens that others can read is refused.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any

import msgspec

from schemaless.errors import Misconfigured
from schemaless.runtime.private_file import read_private_text


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[prod]` in the file: `hosts = ["https://…"]`, and if there are some, `token = "sl_…"` and `ca = "/path"`.

    Hosts are required: the token would go to whatever the environment names.
    """

    hosts: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
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
