"""Certificates that a test makes itself: a CA, and the files of a server that it may replace by bad ones."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme
from cryptography.hazmat.primitives import serialization

from schemaless.runtime.tls import Tls


@dataclass(frozen=True)
class Certificates:
    """Files in one folder. `ca` is believed, and `other_ca` has signed nothing."""

    folder: Path
    authority: trustme.CA

    @property
    def tls(self) -> Tls:
        return Tls(str(self.folder / "ca.pem"))

    @property
    def other_tls(self) -> Tls:
        return Tls(str(self.folder / "other-ca.pem"))

    @property
    def certificate(self) -> Path:
        return self.folder / "server.pem"

    @property
    def key(self) -> Path:
        return self.folder / "server-key.pem"

    @property
    def keystore(self) -> Path:
        """Key and certificate in one file, the key as Kafka wants it."""
        return self.folder / "keystore.pem"

    def issue(self, host: str = "127.0.0.1", *, for_s: float = 86_400.0) -> None:
        """Writes the server's certificate, for one name. With a negative time it has expired."""
        until = datetime.now(UTC) + timedelta(seconds=for_s)
        issued = self.authority.issue_cert(host, not_after=until)
        self.certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(self.key)
        key = serialization.load_pem_private_key(issued.private_key_pem.bytes(), None)
        pkcs8 = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        self.keystore.write_bytes(pkcs8 + self.certificate.read_bytes())


def make_certificates(folder: Path) -> Certificates:
    folder.mkdir(parents=True, exist_ok=True)
    made = Certificates(folder, trustme.CA())
    made.authority.cert_pem.write_to_path(made.tls.ca)
    trustme.CA().cert_pem.write_to_path(made.other_tls.ca)
    made.issue()
    return made
