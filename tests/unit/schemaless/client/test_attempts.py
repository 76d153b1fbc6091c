"""Which host an attempt goes to, and how often one call is tried."""

import pytest

from schemaless.client import attempts as attempts_module
from schemaless.client.attempts import Attempts, Hosts, Limits
from schemaless.client.exchange import ClientRequest, ClientResponse
from schemaless.errors import Misconfigured, Unavailable

A, B, C = "http://a", "http://b", "http://c"
LIMITS = Limits(attempts_max=4, total_timeout_s=10.0, attempt_timeout_s=3.0)


def answer(status: int, *, retryable: bool = True, retry_after: str = "") -> ClientResponse:
    content = b'{"retryable": true}' if retryable else b'{"retryable": false}'
    headers = {"content-type": "application/problem+json"} | ({"retry-after": retry_after} if retry_after else {})
    return ClientResponse(status, headers, content)


def used(hosts: Hosts, now: float, times: int) -> list[str]:
    chosen = []
    for _ in range(times):
        chosen.append(hosts.choose(now))
        hosts.release(chosen[-1])
    return chosen


def test_no_hosts_is_a_mistake_that_is_told():
    """A client without hosts says where to name them."""
    with pytest.raises(Misconfigured, match="SCHEMALESS_HOSTS"):
        Hosts([])


def test_healthy_hosts_take_turns():
    """Requests one after another are spread over all hosts."""
    assert sorted(used(Hosts([A, B, C]), 0.0, 6)) == [A, A, B, B, C, C]


def test_the_host_with_the_least_under_way_is_taken():
    """A host that holds requests for long gets fewer new ones."""
    hosts = Hosts([A, B])
    held = [hosts.choose(0.0), hosts.choose(0.0)]
    hosts.release(held[1])
    assert hosts.choose(0.0) == held[1]


def test_a_failed_host_rests_longer_each_time_and_comes_back():
    """Failures double a host's rest up to a bound; one answer ends it."""
    hosts = Hosts([A, B])
    for _ in range(3):
        hosts.failed(A, 0.0)
    rest = attempts_module.REST_S * 4
    assert set(used(hosts, rest - 0.01, 4)) == {B}
    assert A in used(hosts, rest + 0.01, 2)
    for _ in range(40):
        hosts.failed(A, 0.0)
    assert A in used(hosts, attempts_module.REST_MAX_S + 0.01, 2)
    hosts.failed(A, 0.0)
    hosts.answered(A, 0.0, 0.001)
    assert A in used(hosts, 0.0, 2)


def test_when_all_rest_the_first_to_end_is_tried():
    """A client never refuses to try."""
    hosts = Hosts([A, B])
    hosts.failed(A, 0.0)
    hosts.failed(A, 0.0)
    hosts.failed(B, 0.0)
    assert used(hosts, 0.0, 1) == [B]


def test_a_slow_host_is_passed_over_for_a_moment_then_tried_again():
    """A host far slower than the fastest gets one request a second until it is fast again."""
    hosts = Hosts([A, B])
    hosts.answered(A, 0.0, 0.005)
    hosts.answered(B, 0.0, 2.0)
    assert set(used(hosts, 0.5, 4)) == {A}
    assert B in used(hosts, attempts_module.SLOW_REST_S + 0.01, 2)


def test_one_host_alone_is_never_too_slow():
    """Slow is said in comparison only."""
    hosts = Hosts([A])
    hosts.answered(A, 0.0, 5.0)
    assert used(hosts, 0.0, 1) == [A]


def test_a_broken_attempt_goes_to_another_host_at_once():
    """While an untried host is left there is no pause before it."""
    attempts = Attempts(Hosts([A, B]), LIMITS, 0.0)
    first = attempts.begin(0.0, ClientRequest("GET", "/"))
    assert attempts.broken(first, "refused", 0.1) == 0.0
    second = attempts.begin(0.1, ClientRequest("GET", "/"))
    assert second.url != first.url
    assert attempts.broken(second, "refused", 0.2) > 0.0


def test_attempts_are_bounded_in_number():
    """After the last attempt the reason of the failure is told."""
    attempts = Attempts(Hosts([A]), LIMITS, 0.0)
    for number in range(LIMITS.attempts_max):
        attempt = attempts.begin(float(number), ClientRequest("GET", "/"))
        if number == LIMITS.attempts_max - 1:
            with pytest.raises(Unavailable, match="refused"):
                attempts.broken(attempt, "refused", float(number))
        else:
            attempts.broken(attempt, "refused", float(number))
        attempts.end(attempt)


def test_attempts_are_bounded_in_time():
    """No attempt begins after the total time, and none is given longer than what is left of it."""
    attempts = Attempts(Hosts([A]), LIMITS, 0.0)
    attempt = attempts.begin(8.0, ClientRequest("GET", "/"))
    assert attempt.timeout_s == pytest.approx(2.0)
    with pytest.raises(Unavailable):
        attempts.broken(attempt, "hangs", 10.0)


@pytest.mark.parametrize("text", ["\u00b2", "-1", "1.5", "Wed, 21 Oct 2026 07:28:00 GMT"])
def test_a_retry_after_that_is_no_number_of_seconds_is_none(text):
    """A proxy may send anything: it is no error of the caller's."""
    assert answer(503, retry_after=text).retry_after_s == 0


def test_retry_after_is_honoured():
    """Not before the server said; and when that is too late, its answer is the last word."""
    attempts = Attempts(Hosts([A]), LIMITS, 0.0)
    first = attempts.begin(0.0, ClientRequest("GET", "/"))
    pause = attempts.answered(first, answer(503, retry_after="2"), 0.1)
    assert pause is not None
    assert pause >= 2.0
    second = attempts.begin(3.0, ClientRequest("GET", "/"))
    assert attempts.answered(second, answer(503, retry_after="30"), 3.1) is None


@pytest.mark.parametrize(
    ("given", "again"),
    [
        (answer(200), False),
        (answer(404), False),
        (answer(409), False),
        (answer(501), False),
        (answer(503, retryable=False), False),
        (answer(429), True),
        (answer(500), True),
        (answer(503), True),
        (ClientResponse(502, {}, b"<html>bad gateway"), True),
    ],
)
def test_only_what_may_succeed_later_is_tried_again(given: ClientResponse, again: bool):
    """Statuses of overload and absence are tried again unless the problem says that it is of no use."""
    attempts = Attempts(Hosts([A, B]), LIMITS, 0.0)
    pause = attempts.answered(attempts.begin(0.0, ClientRequest("GET", "/")), given, 0.1)
    assert (pause is not None) is again


def test_what_the_server_has_waited_for_is_not_asked_again():
    """Its 503 says that the time is over. Another attempt would wait as long again."""
    attempts = Attempts(Hosts([A, B]), LIMITS, 0.0)
    attempt = attempts.begin(0.0, ClientRequest("POST", "/", wait_s=1.0, is_final=True))
    assert attempts.answered(attempt, answer(503, retry_after="1"), 1.1) is None
