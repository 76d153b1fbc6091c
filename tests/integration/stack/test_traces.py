"""One put that is traced, on a whole stack: its spans reach a collector of OpenTelemetry from every process."""

import os
import threading
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from schemaless.config import StackSettings
from schemaless.stack import embedded
from schemaless.stack.plan import require_plan
from tests.waiting import until

pytestmark = pytest.mark.timeout(240)

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"


class ReceivedSpan(NamedTuple):
    service: str
    name: str
    trace: str
    span: str
    parent: str
    attributes: dict[str, Any]


@pytest.fixture(scope="module")
def received() -> Iterator[tuple[str, list[ReceivedSpan]]]:
    """A collector: its URL, and what it received."""
    spans: list[ReceivedSpan] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
            for of_service in sent.resource_spans:
                service = next(
                    one.value.string_value for one in of_service.resource.attributes if one.key == "service.name"
                )
                for scope in of_service.scope_spans:
                    spans.extend(
                        ReceivedSpan(
                            service, one.name, one.trace_id.hex(), one.span_id.hex(), one.parent_span_id.hex(),
                            {pair.key: pair.value.string_value or pair.value.int_value for pair in one.attributes},
                        )
                        for one in scope.spans
                    )  # fmt: skip
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", spans
        server.shutdown()


@pytest.fixture(scope="module")
def api(received: tuple[str, list[ReceivedSpan]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of the first API process of a stack whose processes trace every put."""
    settings = StackSettings(home=tmp_path_factory.mktemp("traced"), warm_up_s=0)
    given = {
        "SCHEMALESS_TRACES": "1",
        "OTEL_EXPORTER_OTLP_ENDPOINT": received[0],
        "OTEL_BSP_SCHEDULE_DELAY": "200",
        # None of them is for loopback, and nobody here asks anything else.
        "HTTP_PROXY": "http://127.0.0.1:9",
        "ALL_PROXY": "socks5://127.0.0.1:9",
        "SSL_CERT_FILE": "/nonexistent",
    }
    os.environ.update(given)
    try:
        endpoints = embedded.up(settings)
        token = require_plan(settings.home).token_file
        headers = {"authorization": f"Bearer {token.read_text().strip()}"} if token.exists() else {}
        with httpx.Client(
            base_url=endpoints["api"][0] + "/v1/mezzanine", headers=headers, timeout=30, trust_env=False
        ) as client:
            yield client
    finally:
        for name in given:
            del os.environ[name]
        embedded.down(settings)


def put(api: httpx.Client, row: uuid.UUID, sampled: bool) -> httpx.Response:
    header = {"traceparent": f"00-{TRACE}-{PARENT}-0{int(sampled)}"}
    return api.put(f"/cells/{row}/STATUS/1", json={"driver": str(row), "is_completed": True}, headers=header)


def test_a_put_is_one_trace_from_http_to_the_triggers_call(
    api: httpx.Client, received: tuple[str, list[ReceivedSpan]]
) -> None:
    """The span of the request continues the caller's, and all others continue it: both transactions in MySQL, the
    tailer's, the trigger's call and the index's write. The cell says its trace. What comes unsampled has no span.
    """
    field = {"name": "driver", "column": "STATUS", "path": "driver", "type": "uuid"}
    made = api.put("/indexes/by_driver", json={"shard_field": "driver", "fields": [field]})
    assert made.status_code < 300, made.text
    until(lambda: api.get("/indexes/by_driver").json()["state"] == "active")
    unsampled, row = uuid.uuid4(), uuid.uuid4()
    assert put(api, unsampled, sampled=False).status_code == 201
    assert put(api, row, sampled=True).status_code == 201
    wanted = {
        ("schemaless-api", "PUT /v1/{datastore}/cells/{row_key}/{column}/{ref_key}"),
        ("schemaless-api", "put buffer"),
        ("schemaless-api", "put home"),
        ("schemaless-api", "INSERT buffer"),
        ("schemaless-api", "INSERT entity"),
        ("schemaless-tailer", "send schemaless.mezzanine.cells"),
        ("schemaless-trigger:census", "process count_status"),
        ("schemaless-indexer", "process index:by_driver"),
    }

    def of_trace() -> list[ReceivedSpan]:
        return [span for span in received[1] if span.trace == TRACE]

    def missing() -> set[tuple[str, str]]:
        return wanted - {(span.service, span.name) for span in of_trace()}

    until(lambda: not missing(), missing)
    request = next(span for span in of_trace() if span.name.startswith("PUT "))
    assert (request.parent, request.attributes["http.response.status_code"]) == (PARENT, 201)
    assert (request.attributes["url.scheme"], request.attributes["server.address"]) == ("http", "127.0.0.1")
    assert {span.parent for span in of_trace() if span is not request} == {request.span}
    cell = api.get(f"/cells/{row}/STATUS/1").json()
    assert (cell["trace"], "cause" in cell) == (f"{TRACE}-{request.span}", False)
    assert "trace" not in api.get(f"/cells/{unsampled}/STATUS/1").json()
    timeline = api.get("/explain", params={"row_key": str(row)}).text
    assert f"{TRACE}-{request.span}" in timeline
