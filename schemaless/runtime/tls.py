"""TLS material by path, and the sentence for a refused certificate. Certificates and names are verified (I17)."""

from __future__ import annotations

import os
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path

from schemaless.errors import Misconfigured


@dataclass(frozen=True, slots=True)
class Tls:
    """Paths of PEM files: the CAs that are believed, and our own certificate and key if the server wants one."""

    ca: str
    certificate: str | None = None
    key: str | None = None

    def context(self) -> ssl.SSLContext:
        """Returns a new context, so files that were replaced count at the next connection.

        Raises Misconfigured for a file that can't be read or is no PEM file.
        """
        try:
            context = ssl.create_default_context(cafile=self.ca)
            if self.certificate is not None:
                context.load_cert_chain(self.certificate, self.key)
        except OSError as error:
            files = [path for path in (self.ca, self.certificate, self.key) if path]
            raise Misconfigured(f"no TLS material can be read from {', '.join(files)}: {error}") from error
        return context


def require_certificate(certificate: Path, key: Path | None) -> None:
    """Raises Misconfigured for a certificate and a key that can't be read, or that don't belong together."""
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key)
    except OSError as error:
        raise Misconfigured(f"{certificate} and its key can't be used: {error}") from error


def certificate_refusal(error: BaseException | None) -> str | None:
    """Returns a sentence if an error, or one behind it, is about the other side's certificate, else None."""
    while error is not None:
        # aiohttp's error is one of these, too, and has no text of its own
        if isinstance(error, ssl.SSLCertVerificationError) and hasattr(error, "verify_message"):
            return f"its certificate is refused: {error.verify_message}"
        error = getattr(error, "original_exception", None) or error.__cause__ or error.__context__
    return None


# Files with secrets: one that others can read is refused.


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
