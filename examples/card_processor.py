"""A card processor for trying things out: charges what it is asked to, but fails at first for one card in four.

    python -m examples.card_processor --port 8200 --charges FOLDER

`POST /charges/TRIP` answers {"result": "SUCCESS"}, or 503 with {"result": "TRY AGAIN"}: for a quarter of the trips the
first time, for a sixteenth the second time too. Every charge that succeeds is a line in the folder: the trip and the
Idempotency-Key, with a tab between. A charge is made once for a key, also after a restart. With --ignore-keys a trip
may be charged twice by a caller that dies before it notes the result, as with some processors. The lines show it.
With --takes-s each request takes so long, and the charge happens in the middle of it.
While the folder's file blocked.txt has a line with the trip, the answer is 402 with {"result": "CARD BLOCKED"}.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
import time
from collections import Counter
from enum import Enum
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from zlib import crc32

from examples.call_log import CallLog

BLOCKED_FILE = "blocked.txt"


class Charge(Enum):
    """What becomes of a request: its status and its text."""

    DONE = (HTTPStatus.OK, "SUCCESS")
    FAILED = (HTTPStatus.SERVICE_UNAVAILABLE, "TRY AGAIN")
    BLOCKED = (HTTPStatus.PAYMENT_REQUIRED, "CARD BLOCKED")


class CardProcessor(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, host: str, port: int, folder: Path, ignores_keys: bool, takes_s: float = 0.0) -> None:
        super().__init__((host, port), ChargeHandler)
        self.takes_s = takes_s
        self._charges = CallLog(folder)
        self._blocked = folder / BLOCKED_FILE
        self._ignores_keys = ignores_keys
        self._charged = {key for path in folder.glob("*.tsv") for key in _keys(path)}
        self._asked: Counter[str] = Counter()
        self._lock = threading.Lock()

    def charge(self, trip: str, key: str) -> Charge:
        """Charges a card, unless that key was charged before."""
        with self._lock:
            if key in self._charged and not self._ignores_keys:
                return Charge.DONE
            if self._blocked.is_file() and trip in self._blocked.read_text().split():
                return Charge.BLOCKED
            self._asked[trip] += 1
            if self._asked[trip] <= failures_of(trip):
                return Charge.FAILED
            self._charges.add(trip, key)
            if key:
                self._charged.add(key)
        return Charge.DONE


class ChargeHandler(BaseHTTPRequestHandler):
    server: CardProcessor

    def do_POST(self) -> None:
        folder, _, trip = self.path.strip("/").partition("/")
        if folder != "charges" or not trip:
            self.send_error(404)
            return
        time.sleep(self.server.takes_s / 2)
        status, result = self.server.charge(trip, self.headers.get("Idempotency-Key", "")).value
        time.sleep(self.server.takes_s / 2)
        content = json.dumps({"result": result}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """The charges are the log."""


def _keys(path: Path) -> list[str]:
    """Returns the keys of a log of charges. The last line of a killed process may be torn."""
    lines = [line.rstrip("\n").split("\t") for line in path.open() if line.endswith("\n")]
    return [fields[1] for fields in lines if len(fields) == 2 and fields[1]]


def failures_of(trip: str) -> int:
    """How often a trip fails before it succeeds."""
    number = crc32(trip.encode())
    return (number % 4 == 0) + (number % 16 == 0)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.card_processor")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8200)
    parser.add_argument("--charges", type=Path, required=True, help="folder of the charge log")
    parser.add_argument("--ignore-keys", action="store_true", help="charge again for the same Idempotency-Key")
    parser.add_argument("--takes-s", type=float, default=0.0, help="how long a request takes")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    options = arguments.ignore_keys, arguments.takes_s
    with CardProcessor(arguments.host, arguments.port, arguments.charges, *options) as processor:
        processor.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
