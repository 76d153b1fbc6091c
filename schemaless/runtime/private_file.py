"""Files with secrets: one that others can read is refused."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from schemaless.errors import Misconfigured


def read_private_text(file: Path) -> str | None:
    """Returns the text of a file that only its owner can read, or None if there is none. Raises Misconfigured."""
    try:
        with file.open(encoding="utf-8") as opened:
            status = os.fstat(opened.fileno())
            if stat.S_IMODE(status.st_mode) & 0o077 or status.st_uid != os.geteuid():
                raise Misconfigured(
                    f"{file} holds a secret, and others may read it: run `chmod 600 {file}` as its owner"
                )
            return opened.read()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise Misconfigured(f"{file} can't be read: {error}") from error


def write_private_text(path: Path, text: str) -> None:
    """Writes a file that only its owner can read. A reader sees the old file or the whole new one."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    fresh.touch(mode=0o600)
    with fresh.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
