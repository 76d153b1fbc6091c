"""TLS material by path, and the sentence for a refused certificate. Certificates and names are verified (I17)."""

from __future__ import annotations

import asyncio
import os
import ssl
import stat
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import structlog

from schemaless.errors import Misconfigured

log = structlog.get_logger()

LOOK_PAUSE_S = 2.0
"""How often a process looks whether a certificate or an account of its own was replaced."""


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


class ServedCertificate:
    """The certificate that a server shows. Files that were replaced count for new connections after the next look.

    `ends_at` is when it or the first of its chain ends, in seconds since 1970. The constructor raises Misconfigured for
    files that can't be read, or that don't belong together.
    """

    def __init__(self, certificate: Path, key: Path | None) -> None:
        self._certificate, self._key = certificate, key
        self._files = [file for file in (certificate, key) if file is not None]
        self._said: dict[str, str] = {}
        self._load()
        self.context = self._newest
        self.context.sni_callback = self._show_newest  # called for each handshake, also for one that names no server

    async def run(self) -> None:
        while True:
            self.step()
            await asyncio.sleep(LOOK_PAUSE_S)

    def step(self) -> None:
        """Looks once. What can't be used leaves the old certificate in service."""
        if self._seen != identity_of(*self._files):
            try:
                self._load()
                log.info("the replaced certificate is served", certificate=str(self._certificate), ends=self._ends)
            except Misconfigured as error:
                self._say("the replaced certificate can't be used, the old one is served", str(error))
        if self.ends_at < time.time():
            self._say("the certificate has expired, clients refuse it", f"{self._certificate} ended at {self._ends}")

    def _say(self, what: str, why: str) -> None:
        """Logs what is wrong once for each reason."""
        if self._said.get(what) != why:
            self._said[what] = why
            log.error(what, why=why)

    def _load(self) -> None:
        """Makes a new context. In the old one a certificate of another kind of key would stay beside the new one."""
        from cryptography import x509  # which clients may not have

        seen, context = identity_of(*self._files), ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(self._certificate, self._key)
            chain = x509.load_pem_x509_certificates(self._certificate.read_bytes())
        except (OSError, ValueError) as error:
            raise Misconfigured(f"{self._certificate} and its key can't be used: {error}") from error
        self._seen, self._newest = seen, context
        self.ends_at = min(each.not_valid_after_utc for each in chain).timestamp()

    def _show_newest(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = self._newest

    @property
    def _ends(self) -> str:
        return datetime.fromtimestamp(self.ends_at, UTC).isoformat()


def identity_of(*files: Path) -> list[tuple[int, int, int] | None]:
    """Returns what changes when one of the files is replaced, written, or opened to its reader."""
    return [_identity_of(file) for file in files]


def _identity_of(file: Path) -> tuple[int, int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_ino, status.st_ctime_ns, status.st_size


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
