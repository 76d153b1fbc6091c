"""A server's certificate is read again when its files change, and what can't be used leaves the old one in service."""

import os
import ssl
import time

import pytest
import structlog
import trustme
from cryptography import x509

from schemaless.errors import Misconfigured
from schemaless.runtime.tls import ServedCertificate
from tests.certificates import make_certificates

DAY_S = 86_400.0


@pytest.fixture
def certificates(tmp_path):
    return make_certificates(tmp_path)


@pytest.fixture
def served(certificates):
    return ServedCertificate(certificates.certificate, certificates.key)


def shown(served, ca, ciphers=None):
    """The serial number of the certificate that a new connection gets. It names no server, as to an address."""
    believing = ssl.create_default_context(cafile=ca)
    believing.check_hostname = False
    believing.maximum_version = ssl.TLSVersion.TLSv1_2 if ciphers else ssl.TLSVersion.TLSv1_3
    if ciphers:
        believing.set_ciphers(ciphers)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = believing.wrap_bio(to_client, to_server)
    server = served.context.wrap_bio(to_server, to_client, server_side=True)
    open_ends = [client, server]
    while open_ends:
        for end in list(open_ends):
            try:
                end.do_handshake()
                open_ends.remove(end)
            except ssl.SSLWantReadError:
                pass
    return x509.load_der_x509_certificate(client.getpeercert(True)).serial_number


def serial_of(certificates):
    return x509.load_pem_x509_certificate(certificates.certificate.read_bytes()).serial_number


def test_a_replaced_certificate_is_served_after_the_next_look(served, certificates):
    """And it tells when it ends."""
    certificates.issue(for_s=3 * DAY_S)
    assert shown(served, certificates.tls.ca) != serial_of(certificates)
    with structlog.testing.capture_logs() as lines:
        served.step()
        served.step()
    assert [line["event"] for line in lines] == ["the replaced certificate is served"]
    assert shown(served, certificates.tls.ca) == serial_of(certificates)
    assert 2 * DAY_S < served.ends_at - time.time() < 4 * DAY_S


def test_a_key_of_another_kind_leaves_nothing_of_the_old_certificate(served, certificates):
    """A client that takes both kinds, and one that knows only the old kind's algorithms."""
    issued = certificates.authority.issue_cert("127.0.0.1", key_type=trustme.KeyType.RSA)
    certificates.certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(certificates.key)
    served.step()
    assert shown(served, certificates.tls.ca) == serial_of(certificates)
    assert shown(served, certificates.tls.ca, "ECDHE-RSA-AES256-GCM-SHA384") == serial_of(certificates)
    with pytest.raises(ssl.SSLError):
        shown(served, certificates.tls.ca, "ECDHE-ECDSA-AES256-GCM-SHA384")


@pytest.mark.parametrize("broken", ["key of another", "no PEM", "gone"])
def test_what_can_not_be_used_leaves_the_old_certificate_in_service(served, certificates, broken):
    """Until the files fit again. The log says it, and no key."""
    before, key = serial_of(certificates), certificates.key.read_text()
    certificates.issue(for_s=2 * DAY_S)
    fitting = certificates.key.read_text()
    if broken == "gone":
        certificates.key.unlink()
    else:
        certificates.key.write_text(key if broken == "key of another" else "nothing")
    with structlog.testing.capture_logs() as lines:
        served.step()
    (line,) = lines
    assert (line["event"], line["log_level"]) == (
        "the replaced certificate can't be used, the old one is served",
        "error",
    )
    assert str(certificates.certificate) in line["why"]
    assert shown(served, certificates.tls.ca) == before
    certificates.key.write_text(fitting)
    served.step()
    assert shown(served, certificates.tls.ca) == serial_of(certificates) != before


def test_an_expired_certificate_is_said_once(certificates):
    certificates.issue(for_s=-60)
    served = ServedCertificate(certificates.certificate, certificates.key)
    with structlog.testing.capture_logs() as lines:
        served.step()
        served.step()
    (line,) = lines
    assert line["event"] == "the certificate has expired, clients refuse it"
    assert line["why"].startswith(f"{certificates.certificate} ended at ")
    assert served.ends_at < time.time()


def test_the_first_of_a_chain_that_ends_counts(certificates):
    """Clients refuse a leaf whose issuer has ended."""
    issuer = certificates.authority.create_child_ca(trustme.KeyType.ECDSA)
    issued = issuer.issue_cert("127.0.0.1")
    certificates.issue(for_s=DAY_S)
    short = certificates.certificate.read_bytes()
    certificates.certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems) + short)
    issued.private_key_pem.write_to_path(certificates.key)
    assert 0 < ServedCertificate(certificates.certificate, certificates.key).ends_at - time.time() < 2 * DAY_S


def test_key_and_certificate_may_be_one_file(certificates):
    os.chmod(certificates.keystore, 0o600)
    served = ServedCertificate(certificates.keystore, None)
    assert shown(served, certificates.tls.ca) == serial_of(certificates)


def test_a_certificate_that_is_not_there_is_named(tmp_path):
    with pytest.raises(Misconfigured, match=r"none\.pem and its key can't be used"):
        ServedCertificate(tmp_path / "none.pem", None)
