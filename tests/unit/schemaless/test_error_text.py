"""A failure is shown by its own first line, however long its message or its traceback is."""

import httpx
import pytest

from schemaless.error_text import error_summary, error_text


def raised(work):
    try:
        work()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def of_httpx():
    httpx.Response(404, request=httpx.Request("GET", "http://card.example/pay")).raise_for_status()


def deep(levels=300):
    if levels:
        deep_again(levels - 1)
    raise ValueError("at the bottom\nand what it means")


def deep_again(levels):
    deep(levels)


def chained():
    try:
        of_httpx()
    except httpx.HTTPError as error:
        raise RuntimeError("the card was not charged") from error


def grouped():
    raise ExceptionGroup("several failed", [ValueError("one"), ValueError("two")])


def quoting():
    raise RuntimeError('a helper failed\nTraceback (most recent call last):\n  File "x", line 1\nKeyError: 5')


@pytest.mark.parametrize("characters_max", [1000, 20_000])
@pytest.mark.parametrize(
    ("work", "summary"),
    [
        (of_httpx, "httpx.HTTPStatusError: Client error '404 Not Found' for url 'http://card.example/pay'"),
        (deep, "ValueError: at the bottom"),
        (chained, "RuntimeError: the card was not charged"),
        (grouped, "ExceptionGroup: several failed (2 sub-exceptions)"),
        (quoting, "RuntimeError: a helper failed"),
    ],
)
def test_the_summary_is_the_first_line_of_the_error(work, summary, characters_max):
    """Not the last one, which may be a link, and never a frame, also where the text is cut."""
    text = error_text(raised(work), characters_max)
    assert len(text) <= characters_max
    assert error_summary(text, 300) == summary


def test_a_long_message_loses_its_end():
    """Its class and its beginning say what happened."""

    def work():
        raise ValueError("x" * 5000)

    text = error_text(raised(work), 1000)
    assert len(text) <= 1000
    assert error_summary(text, 20) == "ValueError: xxxxxxxx"


@pytest.mark.parametrize(
    ("text", "summary"),
    [
        ("the worker died", "the worker died"),
        ("a\nb", "a"),
        ("", ""),
        ("    fn(more)\nValueError: cut off", "ValueError: cut off"),
    ],
)
def test_a_text_that_is_no_traceback(text, summary):
    """Causes such as a kill have a sentence."""
    assert error_summary(text, 100) == summary
