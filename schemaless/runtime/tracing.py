"""Traces: the way of a put that was sampled, as spans of OpenTelemetry, from the client to the trigger's call.

Off by default. Then nothing is imported and nothing is measured. Which puts are sampled is decided where a trace
begins, and the trace is stored with the cell (`schemaless.cell.with_trace`), so all who meet the cell continue it.
OpenTelemetry's own variables name the collector, OTEL_EXPORTER_OTLP_ENDPOINT and others. Names of spans
and attributes are those of its semantic conventions for HTTP, databases and messages.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol

from schemaless.cell import StoredCell, cause_and_trace, sampled_trace, traceparent
from schemaless.config import program_version, reach_loopback
from schemaless.names import TRACE_HEADER
from schemaless.runtime.extras import Extra, require

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

_SCOPE = "schemaless"
_NOTHING = nullcontext()
_IS_SERVED: ContextVar[bool] = ContextVar("_IS_SERVED", default=False)
"""Whether a sampled request is served here. OpenTelemetry's own answer to that takes forty times as long."""
_END_TIMEOUT_S = 3.0
_PORT_DIGITS_MAX = 5


class _Noted(Protocol):
    @property
    def cause(self) -> str | None: ...


class _Traces:
    """What this process traces. `share` of the requests that come without a trace begin one."""

    tracer: Tracer | None = None
    provider: TracerProvider | None = None
    share: float = 0.0


def begin(service: str, share: float) -> None:
    """Traces from now on, if there is a share. Raises MissingExtra."""
    if not share:
        return
    require("SCHEMALESS_TRACES", Extra.TRACES)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    named = {"service.name": f"schemaless-{service}", "service.version": program_version()}
    provider = TracerProvider(resource=Resource.create(named))
    reach_loopback()
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    begin_with(provider, share)


def begin_with(provider: TracerProvider, share: float) -> None:
    """Traces to a provider, which programs of users in this process use, too."""
    from opentelemetry import trace

    trace.set_tracer_provider(provider)
    _Traces.provider, _Traces.share = provider, share
    _Traces.tracer = provider.get_tracer(_SCOPE, program_version())


def end() -> None:
    """Sends what wasn't sent, for a while. The process ends next."""
    if _Traces.provider is not None:
        flushing = threading.Thread(target=_Traces.provider.force_flush, daemon=True)  # it heeds no time-out of its own
        flushing.start()
        flushing.join(_END_TIMEOUT_S)


def is_on() -> bool:
    return _Traces.tracer is not None


def is_sampled(given: bytes | None, *, writes: bool) -> bool:
    """Whether a request with this traceparent is traced: one that came sampled, and a share of the writes without."""
    if _Traces.tracer is None:
        return False
    if given:
        return sampled_trace(given.decode("latin-1")) is not None
    return writes and random.random() < _Traces.share


@contextmanager
def serving(method: str, route: str, url: tuple[str, str, str], given: bytes | None) -> Iterator[None]:
    """The span of a request to the API that is sampled. It continues the trace of its traceparent, if it has one.

    `url` has what the client addressed: scheme, Host header and path.
    """
    assert _Traces.tracer is not None, "nothing is sampled before traces begin"
    from opentelemetry.trace import SpanKind

    trace = sampled_trace(given.decode("latin-1")) if given else None
    attributes = {"http.request.method": method, "http.route": route, **_url(*url)}
    parent = None if trace is None else _context_of(trace)
    served = _IS_SERVED.set(True)
    try:
        with _Traces.tracer.start_as_current_span(f"{method} {route}", parent, SpanKind.SERVER, attributes):
            yield
    finally:
        _IS_SERVED.reset(served)


def _url(scheme: str, host: str, path: str) -> dict[str, str | int]:
    name, _, port = host.rpartition(":")
    has_port = bool(name) and port.isdecimal() and len(port) <= _PORT_DIGITS_MAX
    address = {"server.address": (name if has_port else host).strip("[]")} if host else {}
    return {"url.scheme": scheme, "url.path": path, **address, **({"server.port": int(port)} if has_port else {})}


def answered(status: int) -> None:
    """Notes the status of the request that is served now."""
    if (span := _current()) is not None:
        from opentelemetry.trace import StatusCode

        span.set_attribute("http.response.status_code", status)
        if status >= 500:
            span.set_attribute("error.type", str(status))
            span.set_status(StatusCode.ERROR)


def current_trace() -> str | None:
    """Returns the trace and the span that this is part of, TRACE_ID-SPAN_ID, None where nothing is traced."""
    if (span := _current()) is None:
        return None
    context = span.get_span_context()
    return f"{context.trace_id:032x}-{context.span_id:016x}"


def waited(name: str, seconds: float) -> None:
    """A part of the current span that ended now."""
    if (tracer := _Traces.tracer) is not None and _current() is not None:
        now = time.time_ns()
        tracer.start_span(name, start_time=now - round(seconds * 1e9)).end(now)


def wrote(traces: Iterable[str], name: str, began_at: float, attributes: Mapping[str, str | int]) -> None:
    """One span of a server's for each of the traces, which a transaction served together. `began_at`: of time.time."""
    _note(traces, name, "CLIENT", began_at, attributes)


def sent(cells: Iterable[StoredCell], topic: str, partition: int, began_at: float) -> None:
    """One span for each traced cell that a transaction published."""
    attributes = {
        "messaging.system": "kafka",
        "messaging.operation.type": "send",
        "messaging.operation.name": "send",
        "messaging.destination.name": topic,
        "messaging.destination.partition.id": str(partition),
    }
    _note(traces_of(cells), f"send {topic}", "PRODUCER", began_at, attributes)


def processed(cells: Iterable[StoredCell], consumer: str, began_at: float) -> None:
    """One span for each traced cell whose effect was written together with others', such as an index's entries."""
    _note(traces_of(cells), f"process {consumer}", "CONSUMER", began_at, _processing(consumer))


def call_of(cell: StoredCell, program: str, function: str) -> Span | None:
    """Begins the span of a trigger function's call, None where the cell has no trace. The caller ends it."""
    if (tracer := _Traces.tracer) is None or (trace := cause_and_trace(cell.cause)[1]) is None:
        return None
    from opentelemetry.trace import SpanKind

    attributes = _processing(f"trigger:{program}") | {"code.function.name": function}
    return tracer.start_span(f"process {function}", _context_of(trace), SpanKind.CONSUMER, attributes)


def within(span: Span | None) -> AbstractContextManager[object]:
    """Makes a span the current one, so that what is called continues its trace."""
    if span is None:
        return _NOTHING
    from opentelemetry.trace import use_span

    return use_span(span, record_exception=False, set_status_on_exception=False)


def ended(span: Span, failed: tuple[str, str] | None) -> None:
    """Ends a span. `failed` has the error's type and text. The text can be encoded, which a user's own may not."""
    if failed is not None:
        from opentelemetry.trace import StatusCode

        span.set_attribute("error.type", failed[0])
        span.set_status(StatusCode.ERROR, failed[1])
    span.end()


@contextmanager
def calling(method: str, path: str) -> Iterator[Mapping[str, str]]:
    """The span of a request of the client, with all its attempts, where the program uses OpenTelemetry. Gives the
    header that continues it, also where it says that nothing is sampled.

    A service of ours begins none: what it calls belongs to a traced cell, or to no trace.
    """
    if "opentelemetry.trace" not in sys.modules:
        yield {}
        return
    from opentelemetry import trace

    if _Traces.tracer is not None and not trace.get_current_span().get_span_context().is_valid:
        yield {}
        return
    attributes = {"http.request.method": method, "url.path": path}
    tracer = trace.get_tracer(_SCOPE, program_version())
    with tracer.start_as_current_span(method, kind=trace.SpanKind.CLIENT, attributes=attributes) as span:
        context = span.get_span_context()
        mine = f"{context.trace_id:032x}-{context.span_id:016x}"
        yield {TRACE_HEADER: traceparent(mine, context.trace_flags.sampled)} if context.is_valid else {}


def traces_of(cells: Iterable[_Noted]) -> list[str]:
    """Returns the traces that cells have, none where nothing is traced."""
    if _Traces.tracer is None:
        return []
    return [trace for cell in cells if cell.cause and (trace := cause_and_trace(cell.cause)[1])]


def _processing(consumer: str) -> dict[str, str]:
    return {
        "messaging.system": "kafka",
        "messaging.operation.type": "process",
        "messaging.operation.name": "process",
        "messaging.consumer.group.name": consumer,
    }


def _note(traces: Iterable[str], name: str, kind: str, began_at: float, attributes: Mapping[str, str | int]) -> None:
    if (tracer := _Traces.tracer) is None:
        return
    from opentelemetry.trace import SpanKind

    for trace in traces:
        span = tracer.start_span(
            name, _context_of(trace), SpanKind[kind], dict(attributes), start_time=round(began_at * 1e9)
        )
        span.end()


def _current() -> Span | None:
    """Returns the span of the request that is served now, if it is sampled."""
    if not _IS_SERVED.get():
        return None
    from opentelemetry.trace import get_current_span

    span = get_current_span()
    return span if span.is_recording() else None


def _context_of(trace: str) -> Context:
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

    trace_id, _, span_id = trace.partition("-")
    sampled = TraceFlags(TraceFlags.SAMPLED)
    parent = SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=sampled)
    return set_span_in_context(NonRecordingSpan(parent))
