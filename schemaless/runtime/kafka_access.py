"""How Kafka lets us in: the account and the CA. One place for every client, whether librdkafka's or Faust's (I17).

A plain address takes both from the settings of its process. A KafkaAddress brings its own.
"""

from __future__ import annotations

import socket
import ssl
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
import structlog

from schemaless.config import KafkaSettings
from schemaless.errors import BusRefuses, BusUnavailable, Misconfigured
from schemaless.runtime.tls import LOOK_PAUSE_S, Tls, certificate_refusal, identity_of, read_private_text
from schemaless.shapes import shape

log = structlog.get_logger()

SCRAM = "SCRAM-SHA-512"
NO_RIGHT_ON_GROUP = "the account has no ACL with Read on this group"
NO_RIGHT_ON_TOPIC = "the account has no ACL for this topic: Read to read it, Write to write it, Create to make it"
WRONG_PASSWORD = "the account's name or password is wrong"
_HANDSHAKE_TIMEOUT_S = 2.0
# SaslHandshake, version 1, correlation 1, without a client id, for a mechanism that no broker has. A listener without
# accounts answers that it isn't asked here.
_ASK_FOR_MECHANISMS = struct.pack(">ihhihh1s", 13, 17, 1, 1, -1, 1, b"?")
_ANSWER = struct.Struct(">iih")  # length, correlation, error
_UNSUPPORTED_MECHANISM = 33


class KafkaAccount(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An account of Kafka, as in endpoints.json and in the file that SCHEMALESS_KAFKA_ACCOUNT names."""

    user: str
    password: str
    mechanism: str = SCRAM

    def __repr__(self) -> str:
        return f"KafkaAccount(user={self.user!r})"


class KafkaAccess(msgspec.Struct, frozen=True):
    """Without an account we are nobody, and without TLS the connection is open."""

    account: KafkaAccount | None = None
    tls: Tls | None = None
    account_file: Path | None = None
    """Where the account is from. The account of an address has no file."""


class KafkaAddress(str):
    """Bootstrap servers, host:port[,host:port], and how they let us in."""

    access: KafkaAccess

    def __new__(cls, bootstrap: str, access: KafkaAccess) -> KafkaAddress:
        made = super().__new__(cls, bootstrap)
        made.access = access
        return made

    def __deepcopy__(self, _memo: object) -> KafkaAddress:
        return self  # nothing of it changes


def access_of(bootstrap: str) -> KafkaAccess:
    """Returns how an address lets us in. Raises Misconfigured for an account file that can't be used, unless clients of
    this process live that have its account.
    """
    if isinstance(bootstrap, KafkaAddress):
        return bootstrap.access
    settings = KafkaSettings()
    account = None if settings.account is None else _account_file(settings.account).present()
    return KafkaAccess(account, None if settings.ca is None else Tls(str(settings.ca)), settings.account)


def read_account(file: Path) -> KafkaAccount:
    """Raises Misconfigured."""
    text = read_private_text(file)
    if text is None:
        raise Misconfigured(f"there is no {file}, which SCHEMALESS_KAFKA_ACCOUNT names")
    try:
        return msgspec.json.decode(text, type=shape(KafkaAccount))
    except msgspec.DecodeError as error:
        raise Misconfigured(f"{file} is no account of Kafka: {error}") from error


# Accounts change while clients live. Each client reads the account of its file once, and is given the next one.

Take = Callable[[Any, KafkaAccount], None]
"""Gives a client another account, which counts for its next connection."""


def keep_account(file: Path, client: object, account: KafkaAccount, take: Take) -> None:
    """Lets a client that was made with an account take the next ones of this file, as long as it lives."""
    _account_file(file).keep(client, account, take)


class KafkaAccountFile:
    """An account's file and the clients that were made with it. A thread looks at the file while there are some."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._seen: object = None
        self._account: KafkaAccount | None = None  # which all clients have
        self._clients = WeakKeyDictionary[object, Take]()
        self._is_watched = False
        self._unusable = ""
        self._lock = threading.Lock()

    def present(self) -> KafkaAccount:
        """Returns the account of the file, or of living clients where it can't be used now. Raises Misconfigured."""
        try:
            return read_account(self._file)
        except Misconfigured:
            with self._lock:
                if self._account is None or not self._clients:
                    raise
                return self._account

    def keep(self, client: object, account: KafkaAccount, take: Take) -> None:
        with self._lock:
            self._clients[client] = take
            self._account = self._account or account
            starts, self._is_watched = not self._is_watched, True
        self.look()
        if self._account != account:  # the file was replaced after this client had read it
            take(client, self._account)
        if starts:
            threading.Thread(target=self._watch, name="kafka account", daemon=True).start()

    def look(self) -> None:
        """Gives all clients the account that the file has now, if it was replaced. One that can't be read is logged."""
        seen = identity_of(self._file)
        if seen == self._seen:
            return
        try:
            account = read_account(self._file)
        except Misconfigured as error:
            if str(error) != self._unusable:
                self._unusable = str(error)
                log.error("the replaced account of Kafka can't be used", why=self._unusable)
            return
        self._unusable = ""
        with self._lock:
            before, self._seen, self._account = self._account, seen, account
            clients = list(self._clients.items())
        if account == before:
            return
        for client, take in clients:
            take(client, account)
        log.info("the replaced account of Kafka is used", account=account.user, file=str(self._file))

    def _watch(self) -> None:
        while True:
            time.sleep(LOOK_PAUSE_S)
            with self._lock:
                if not self._clients:
                    self._is_watched = False
                    return
            self.look()


_account_file = cache(KafkaAccountFile)


refusals: Counter[tuple[str, str]] = Counter()
"""How often each broker refused each account of this process, as Kafka's clients tell."""


def note_refusal(broker: str, user: str) -> str:
    """Counts and logs that a broker refuses an account. Returns the sentence."""
    refusals[broker, user] += 1
    log.error("Kafka refuses the account", broker=broker, account=user, why=WRONG_PASSWORD)
    return f"Kafka at {broker} refuses the account {user!r}: {WRONG_PASSWORD}"


def require_certificate_of(bootstrap: str, tls: Tls) -> None:
    """Raises BusUnavailable with a sentence for a broker whose certificate is refused, and for a CA that can't be read.

    Kafka's clients only say that no broker can be reached, and try for ever. A broker that can't be reached now is left
    to them.
    """
    try:
        context = tls.context()
    except Misconfigured as error:  # it may just be replaced
        raise BusUnavailable(f"Kafka at {bootstrap}: {error}") from error
    for address in bootstrap.split(","):
        if (connection := _connect(address, context)) is not None:
            connection.close()


def require_account(bootstrap: str, context: ssl.SSLContext | None) -> None:
    """Raises BusRefuses where a broker lets in nobody without an account. It is for a client that has none.

    Such a broker closes the connections of Kafka's clients, which then say that none can be reached.
    """
    for address in bootstrap.split(","):
        if (connection := _connect(address, context)) is None:
            continue
        with connection, connection.makefile("rb") as answers, suppress(OSError):
            connection.sendall(_ASK_FOR_MECHANISMS)
            answer = answers.read(_ANSWER.size)
            if len(answer) == _ANSWER.size and _ANSWER.unpack(answer)[-1] == _UNSUPPORTED_MECHANISM:
                raise BusRefuses(
                    f"Kafka at {address} lets in nobody without an account, and there is none: name the file with one"
                    " in SCHEMALESS_KAFKA_ACCOUNT"
                )


def _connect(address: str, context: ssl.SSLContext | None) -> socket.socket | None:
    """Returns None for a broker that can't be reached now. Raises BusUnavailable for a certificate that is refused."""
    host, _, port = address.strip().rpartition(":")
    host = host.removeprefix("[").removesuffix("]")  # of IPv6
    try:
        plain = socket.create_connection((host, int(port)), _HANDSHAKE_TIMEOUT_S)
        return plain if context is None else context.wrap_socket(plain, server_hostname=host)
    except ssl.SSLError as error:
        raise BusUnavailable(f"Kafka at {address}: {certificate_refusal(error) or error}") from error
    except (OSError, ValueError):  # also a name that can't be resolved: another broker may answer
        return None
