"""The log of a service: one format for all lines, and an outage that says what happened without filling the disk."""

import json
import logging
import ssl
import subprocess
import sys
from itertools import pairwise

import pytest
import structlog
from aiokafka.errors import AuthenticationFailedError, GroupAuthorizationFailedError, SaslAuthenticationFailed

from schemaless.runtime.logs import KINDS_MAX, LogLimit, RepeatLimiter

OUTAGE_S = 600
KINDS_OF_AN_OUTAGE = 5  # that one process has in an outage, about

LINES = """
import logging
from schemaless.config import LogFormat
from schemaless.runtime.logs import configure_logging
import structlog, stamina

configure_logging("info", "tailer", LogFormat("{log_format}"))
structlog.get_logger().info("partitions assigned", datastore="trips", partitions=[0, 1])
logging.getLogger("aiokafka").error("Unable connect to node with id %s: %s", 1, "refused")
for attempt in stamina.retry_context(on=ValueError, attempts=3, wait_initial=0, wait_max=0):
    with attempt:
        if attempt.num < 3:
            raise ValueError("away")
try:
    1 / 0
except ZeroDivisionError:
    structlog.get_logger().exception("a defect")
"""


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def limiter(clock):
    return RepeatLimiter(clock)


@pytest.mark.parametrize("level", ["warning", "error"])
@pytest.mark.parametrize("per_second", [1, 10, 200])
def test_an_outage_of_ten_minutes_is_few_lines(limiter, clock, level, per_second):
    """However many lines a second a process would write: 30 at most, with five kinds of them. None is uncounted."""
    written = left_out = 0
    for n in range(OUTAGE_S * per_second):
        clock.now = 1000.0 + n / per_second
        for kind in range(KINDS_OF_AN_OUTAGE):
            if (before := limiter.admit(level, f"kind {kind}")) is not None:
                written += 1
                left_out += before
    assert KINDS_OF_AN_OUTAGE <= written <= 30
    clock.now += 10_000
    last = sum(limiter.admit(level, f"kind {kind}") for kind in range(KINDS_OF_AN_OUTAGE))
    assert written + left_out + last == OUTAGE_S * per_second * KINDS_OF_AN_OUTAGE


def test_what_comes_again_after_a_quiet_minute_is_written_at_once(limiter, clock):
    """Another outage is news."""
    assert [limiter.admit("warning", "away") for _ in range(5)] == [0, 0, 0, None, None]
    clock.now += 61
    assert limiter.admit("warning", "away") == 2
    assert limiter.admit("warning", "away") == 0


@pytest.mark.parametrize("outage_s", [600, 6 * 3600, 5 * 86400])
def test_an_outage_that_follows_a_long_one_is_written_at_once(limiter, clock, outage_s):
    """However long the one before was, two quiet minutes end it. Nobody waits a day for the first line of the next."""
    end = clock.now + outage_s
    while clock.now < end:
        limiter.admit("warning", "away")
        clock.now += 20
    clock.now += 120
    assert limiter.admit("warning", "away") is not None
    assert limiter.admit("warning", "away") == 0


def test_an_outage_of_days_is_told_every_hour(limiter, clock):
    """The log of the last hour says what is wrong."""
    told = []
    for n in range(3 * 24 * 120):
        clock.now = 1000.0 + 30 * n
        if limiter.admit("warning", "away") is not None:
            told.append(clock.now)
    assert max(later - before for before, later in pairwise(told)) <= 3660


def test_another_server_and_another_error_are_other_kinds(limiter):
    """What goes on for one hides nothing about the next: a second cluster that goes away, a second defect."""
    limit = LogLimit(limiter)

    def is_written(line, error=None):
        try:
            limit(None, "warning", {"event": "heads can't be read", **line, "exc_info": error})
        except structlog.DropEvent:
            return False
        return True

    for line in ({"cluster": "a"}, {"cluster": "b"}, {"node": "a1"}, {"problem": "internal"}):
        assert [is_written(line) for _ in range(4)] == [True, True, True, False]
        assert [is_written(line, error) for error in (ValueError("x"), KeyError("y"))] == [True, True]
    assert not any(is_written({"cluster": "a", "why": why}) for why in ("late", "refused"))


def test_a_library_s_line_that_does_not_fit_its_values_breaks_nothing(limiter, clock):
    """Logging itself forgives that, and so does the count of what was left out."""
    limit = LogLimit(limiter)
    records = [logging.LogRecord("lib", logging.ERROR, "", 0, "%s and %s", ("one",), None) for _ in range(6)]
    for record in records:
        limit.filter(record)
    clock.now += 61
    assert limit.filter(logging.LogRecord("lib", logging.ERROR, "", 0, "%s and %s", ("one",), None))


def test_a_broker_that_is_away_is_one_kind_of_line_whatever_aiokafka_says_of_it(limiter, clock):
    """Nine kinds of them were 19 lines in the first second, and none said Kafka. What else it says is news."""
    limit = LogLimit(limiter)
    said = [
        ("aiokafka", logging.ERROR, "Unable connect to node with id %s: %s", (1, "refused")),
        ("aiokafka", logging.ERROR, "Unable to update metadata from %s", ([1],)),
        ("aiokafka", logging.WARNING, "Unable to request metadata from node with id %s: %r", (1, "closed")),
        ("aiokafka.consumer.fetcher", logging.ERROR, "Failed fetch messages from %s: %s", (1, "closed")),
        ("aiokafka.consumer.group_coordinator", logging.ERROR, "Group Coordinator Request failed: %s", ("late",)),
        ("aiokafka.consumer.group_coordinator", logging.WARNING, "Marking the coordinator dead (node %s)for group %s.",
         (1, "g")),
    ]  # fmt: skip
    written = []
    for _ in range(OUTAGE_S):
        clock.now += 1
        for name, level, text, values in said:
            record = logging.LogRecord(name, level, "", 0, text, values, None)
            if limit.filter(record):
                written.append(record.getMessage())
    assert 3 <= len(written) <= 6
    assert written[0] == "a broker of Kafka doesn't answer: Unable connect to node with id 1: refused"
    assert all(line.startswith("a broker of Kafka doesn't answer: ") for line in written)
    refused = ("Not authorized to read from topic %s.", ("trips",))
    assert limit.filter(logging.LogRecord("aiokafka.consumer.fetcher", logging.WARNING, "", 0, *refused, None))


@pytest.mark.parametrize(
    ("error", "happens"),
    [
        (AuthenticationFailedError("no such account"), "refuses this process"),
        (SaslAuthenticationFailed("wrong password"), "refuses this process"),
        (GroupAuthorizationFailedError("trips"), "refuses this process"),
        (ssl.SSLCertVerificationError("certificate verify failed"), "has a certificate that isn't accepted"),
        (ssl.SSLEOFError("closed"), "doesn't answer"),
    ],
)
def test_a_broker_that_refuses_is_not_told_as_one_that_is_away(limiter, error, happens):
    """An operator who is told that Kafka is away looks at brokers. They run, and the password is wrong.

    So it is another kind of line, which an outage before it doesn't hold up.
    """
    limit = LogLimit(limiter)

    def line(value):
        said = ("Unable connect to node with id %s: %s", (1, value))
        record = logging.LogRecord("aiokafka", logging.ERROR, "", 0, *said, None)
        return record.getMessage() if limit.filter(record) else None

    told = [line(error) for _ in range(10)]
    assert told[0] == f"a broker of Kafka {happens}: Unable connect to node with id 1: {error}"
    assert told[3:] == [None] * 7
    assert (line(ConnectionRefusedError("refused")) is None) is (happens == "doesn't answer")


def test_other_kinds_are_not_held_up(limiter):
    """That it is back is another kind of line than that it is away."""
    for _ in range(100):
        limiter.admit("warning", "away")
    assert limiter.admit("info", "back") == 0


def test_the_kinds_that_are_known_are_bounded(limiter):
    """I14: a text that always differs costs no memory."""
    for n in range(KINDS_MAX * 3):
        limiter.admit("warning", f"text {n}")
    assert len(limiter._kinds) <= KINDS_MAX


def test_libraries_are_limited_by_what_their_lines_have_in_common(limiter):
    """aiokafka names another node and another error in each of its lines."""
    limit = LogLimit(limiter)
    records = [
        logging.LogRecord(
            "aiokafka", logging.ERROR, "", 0, "Unable connect to node with id %s: %s", (n, "refused"), None
        )
        for n in range(1000)
    ]
    assert sum(limit.filter(record) for record in records) == 3


def test_a_line_that_says_so_is_always_written(limiter):
    """As each cell of the probe."""
    limit = LogLimit(limiter)
    lines = [limit(None, "info", {"event": "probe", "each": True, "n": n}) for n in range(100)]
    assert lines == [{"event": "probe", "n": n} for n in range(100)]
    for _ in range(5):
        limit(None, "info", {"event": "probe"})
    with pytest.raises(structlog.DropEvent):
        limit(None, "info", {"event": "probe"})


def written(log_format):
    command = [sys.executable, "-c", LINES.format(log_format=log_format)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout


def test_json_lines_of_ours_and_of_libraries_have_the_same_members():
    """Time, level, service and event. A defect has its traceback. A retry is no line at this level."""
    ours, library, defect = [json.loads(line) for line in written("json").splitlines()]
    assert (ours["event"], ours["level"], ours["service"], ours["datastore"]) == (
        "partitions assigned", "info", "tailer", "trips",
    )  # fmt: skip
    away = "a broker of Kafka doesn't answer: Unable connect to node with id 1: refused"
    assert (library["event"], library["logger"]) == (away, "aiokafka")
    assert ours.keys() - {"datastore", "partitions"} == library.keys() - {"logger"}
    assert "ZeroDivisionError" in defect["exception"]


def test_text_lines_of_ours_and_of_libraries_look_alike():
    lines = written("text").splitlines()
    assert all("service=tailer" in line for line in lines[:2])
    assert [line.split(" ", 1)[1][:9].strip("[ ") for line in lines[:2]] == ["info", "error"]
    assert "stamina" not in "".join(lines)


def test_a_line_that_can_not_be_written_costs_a_line():
    """A full disk or a broken pipe: whoever logs goes on, through structlog as through a library's logger."""
    script = (
        "from schemaless.runtime.outputs import wait_for_nobody\nwait_for_nobody()\n"
        + LINES.format(log_format="text")
        + "\nimport os, sys\nprint('answered', file=sys.stderr)\nos._exit(0)"
    )
    with open("/dev/full", "w") as full:
        ran = subprocess.run([sys.executable, "-c", script], stdout=full, stderr=-1, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "answered\n")
