"""Traces without a server: what begins one, what continues one, and what cells and records keep of it."""

import threading

import msgspec
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import openmetrics

from api.metrics import Metrics
from schemaless.bus.partition_log import _headers_of
from schemaless.cell import StoredCell, cause_and_trace, sampled_trace, with_trace
from schemaless.codec import cell_view, encode_body, encode_record
from schemaless.consume.cell_calls import Call, _called
from schemaless.record import decode_stored
from schemaless.runtime import tracing
from schemaless.triggers.decorator import Context, Skip, trigger

TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACE = f"{TRACE_ID}-{SPAN_ID}"
CAUSE = "billing/bill@3:1:42"
CELL = StoredCell(bytes(16), "BASE", 1, 3, 1, 7, 1_700_000_000_000_000, encode_body({"a": 1}))
URL = ("http", "127.0.0.1:8000", "/p")
TRACED = msgspec.structs.replace(CELL, cause=with_trace(None, TRACE))


@pytest.fixture
def spans(monkeypatch):
    """What this process records, with every request that has no trace beginning one."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing._Traces, "tracer", provider.get_tracer("test"))
    monkeypatch.setattr(tracing._Traces, "share", 1.0)
    return exporter.get_finished_spans


@pytest.mark.parametrize(
    ("given", "trace"),
    [
        (f"00-{TRACE}-01", TRACE),
        (f"00-{TRACE}-03", TRACE),
        (f"01-{TRACE}-01-later", TRACE),
        (f"00-{TRACE}-00", None),
        (f"ff-{TRACE}-01", None),
        (f"00-{'0' * 32}-{SPAN_ID}-01", None),
        (f"00-{TRACE_ID}-{'0' * 16}-01", None),
        (f"00-{TRACE.upper()}-01", None),
        ("", None),
        ("\x00" * 100, None),
    ],
)
def test_only_a_sampled_traceparent_is_continued(given, trace):
    """W3C's form, and a later version of it with more members."""
    assert sampled_trace(given) == trace


@pytest.mark.parametrize("cause", [None, CAUSE, f"{'w' * 200}@1:1:1"])
def test_cause_and_trace_share_a_column(cause):
    assert cause_and_trace(with_trace(cause, TRACE)) == (cause, TRACE)
    assert cause_and_trace(cause) == (cause, None)


def test_a_cause_goes_before_a_trace():
    """The column has 300 characters, and a cause that was given is never cut."""
    cause = f"{'w' * 250}@123456789:1:1"
    assert with_trace(cause, TRACE) == cause


@pytest.mark.parametrize("cause", [None, CAUSE])
def test_a_record_has_both_in_headers_of_their_own(cause):
    """Readers of the topic get the same cell as readers of the log, and others W3C's header."""
    cell = msgspec.structs.replace(CELL, cause=with_trace(cause, TRACE))
    headers = dict(_headers_of(cell))
    assert headers["traceparent"] == f"00-{TRACE}-01".encode()
    assert headers.get("cause") == (None if cause is None else cause.encode())
    assert decode_stored(encode_record(cell), headers) == cell
    view = cell_view(cell)
    assert (view.get("cause"), view["trace"]) == (cause, TRACE)


def test_a_record_with_a_header_that_isnt_sampled_is_the_cell_alone():
    """A mirror that is instrumented may add one."""
    headers = {**dict(_headers_of(CELL)), "traceparent": b"\xff\x00"}
    assert decode_stored(encode_record(CELL), headers) == CELL


def test_a_request_that_comes_unsampled_begins_no_trace(spans):
    assert not tracing.is_sampled(f"00-{TRACE}-00".encode(), writes=True)
    assert tracing.is_sampled(f"00-{TRACE}-01".encode(), writes=False)
    assert tracing.current_trace() is None
    assert spans() == ()


def test_a_request_without_a_trace_begins_one_by_chance(spans, monkeypatch):
    assert tracing.is_sampled(None, writes=True)
    with tracing.serving("PUT", "/p", URL, None):
        assert tracing.current_trace() is not None
        tracing.waited("put home", 0.25)
        tracing.answered(503)
    part, request = spans()
    assert (part.name, part.parent.span_id) == ("put home", request.context.span_id)
    assert (part.end_time - part.start_time) / 1e9 == pytest.approx(0.25)
    assert (request.name, request.status.is_ok, request.attributes["error.type"]) == ("PUT /p", False, "503")
    assert tracing.current_trace() is None
    monkeypatch.setattr(tracing._Traces, "share", 0.0)
    assert not tracing.is_sampled(None, writes=True)


@pytest.mark.parametrize(
    ("host", "server"),
    [
        ("cells.example:8443", {"server.address": "cells.example", "server.port": 8443}),
        ("cells.example", {"server.address": "cells.example"}),
        ("[::1]:8000", {"server.address": "::1", "server.port": 8000}),
        ("x:99999999999999999999", {"server.address": "x:99999999999999999999"}),
        ("", {}),
    ],
)
def test_a_request_names_what_the_client_addressed(spans, host, server):
    """By the names of OpenTelemetry's stable conventions for HTTP servers. What is no port is left as it is."""
    with tracing.serving("PUT", "/cells/{row_key}", ("https", host, "/cells/7"), None):
        pass
    (request,) = spans()
    named = {"http.request.method": "PUT", "http.route": "/cells/{row_key}", "url.scheme": "https"}
    assert request.attributes == {**named, "url.path": "/cells/7", **server}


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ValueError("no card"), "ValueError", "ValueError: no card"),
        (ValueError("half \ud83d"), "ValueError", "ValueError: half \\ud83d"),
        (Unspeakable(), "Unspeakable", "Unspeakable"),
        (Skip("not ours"), None, None),
    ],
)
def test_a_call_of_a_traced_cell_ends_as_that_of_any_other(spans, error, kind, text):
    """Whatever the error's text is. What the function puts is part of the cell's trace, and a verdict is no failure."""
    headers = []

    def bill(cell):
        with tracing.calling("PUT", "/cells") as header:
            headers.append(header)
        raise error

    for cell in (CELL, TRACED):
        call = Call(trigger(column="BASE")(bill).__schemaless_triggers__[0], cell, Context("billing", "trips", 1), None)
        assert _called(call).error is error
    assert (headers[0], headers[1]["traceparent"].split("-")[1]) == ({}, TRACE_ID)
    (process,) = (span for span in spans() if span.name.startswith("process"))
    assert (process.name, process.parent.span_id) == ("process bill", int(SPAN_ID, 16))
    assert process.attributes.get("error.type") == kind
    assert text is None or text in process.status.description


def test_a_read_begins_no_trace(spans):
    """The share is one of puts. A read that came sampled is continued all the same."""
    assert not tracing.is_sampled(None, writes=False)


def test_a_collector_that_hangs_keeps_no_process_from_ending(monkeypatch):
    begun = threading.Event()

    class Hanging:
        def force_flush(self):
            begun.set()
            threading.Event().wait()

    monkeypatch.setattr(tracing._Traces, "provider", Hanging())
    monkeypatch.setattr(tracing, "_END_TIMEOUT_S", 0.01)
    tracing.end()
    assert begun.is_set()


def test_a_client_outside_of_a_trace_sends_no_header():
    with tracing.calling("PUT", "/cells") as header:
        assert header == {}


def test_histograms_name_the_newest_trace(spans):
    """As exemplars, which OpenMetrics has and the older text format hasn't."""
    metrics = Metrics()
    with tracing.serving("PUT", "/p", URL, f"00-{TRACE}-01".encode()):
        metrics.answered("put_cell", 201, 0.004)
        mine = tracing.current_trace()
    text = openmetrics.exposition.generate_latest(metrics.registry).decode()
    line = next(one for one in text.splitlines() if 'le="0.005"' in one and "request_seconds" in one)
    assert f'trace_id="{mine.split("-")[0]}"' in line
