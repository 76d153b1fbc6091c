"""The load generator against a small server of the test's own: what it counts is what was answered."""

import socketserver
import threading
from contextlib import contextmanager

import pytest

from bench.load import Outcome, Plan, drive
from bench.trips import TripMaker, put_request


@contextmanager
def serving(answers):
    """A server that answers each request by the next of `answers`, in two pieces; gives its port."""
    pending = iter(answers)

    class Handler(socketserver.StreamRequestHandler):
        def handle(self):
            while line := self.rfile.readline():
                length = 0
                while (header := self.rfile.readline()) != b"\r\n":
                    if header.lower().startswith(b"content-length:"):
                        length = int(header.split(b":")[1])
                self.rfile.read(length)
                assert line.startswith(b"PUT ")
                status, body = next(pending)
                self.wfile.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n" % (status, len(body)))
                self.wfile.flush()
                self.wfile.write(b"\r\n" + body)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def requests(count):
    return [put_request(trip) for trip in TripMaker(seed=1).make(count)]


def test_each_request_is_sent_once_and_each_answer_counted_by_status():
    """Two connections share the requests; the run ends with the last answer."""
    answers = [(201, b"{}"), (409, b"a longer body"), (201, b""), (201, b"{}"), (503, b"{}")]
    with serving(answers) as port:
        outcome = drive(Plan(port, connections=2, seconds=30.0, requests=requests(5)))
    assert outcome.statuses == {201: 3, 409: 1, 503: 1}
    assert len(outcome.latencies_ms) == 5


def test_the_time_bounds_a_run():
    """With the time over at once, only what was sent first is answered."""
    with serving([(201, b"{}")] * 100) as port:
        outcome = drive(Plan(port, connections=3, seconds=0.0, requests=requests(50)))
    assert outcome.statuses == {201: 3}


def test_an_answer_of_another_status_spoils_the_round():
    """Figures of a tier that refuses requests would mean nothing."""
    with pytest.raises(AssertionError, match="503"):
        Outcome(1.0, [1.0, 1.0], {201: 1, 503: 1}).expect(201)
    assert Outcome(1.0, [1.0], {201: 1}).expect(201).rate == 1.0
