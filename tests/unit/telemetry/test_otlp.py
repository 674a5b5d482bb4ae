"""Traces reach a collector over HTTP; where none is wanted nothing is imported."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from aegis.core.ids import ModelId, RequestId
from aegis.core.model import Slo
from aegis.telemetry.tracing import traced

trace_service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")

M, R = ModelId("m"), RequestId(7)


@contextmanager
def collector() -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """Its address, and what is posted to it."""
    posted: list[tuple[str, bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", posted
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_request_is_a_tree_of_its_stages() -> None:
    with collector() as (url, posted):
        with traced(url, "proxy-0") as stages:
            assert stages
            stages.arrived(R, M, Slo(), 1_000, prompt_tokens=5)
            stages.started(R, 2_000)
            stages.tokens(R, 5_000, 1)
            stages.end(R, "finished", 9_000)
        ((path, body),) = posted
    assert path == "/v1/traces"
    request = trace_service.ExportTraceServiceRequest.FromString(body)
    spans = {span.name: span for span in request.resource_spans[0].scope_spans[0].spans}
    root = spans.pop("request m")
    assert {name: span.end_time_unix_nano - span.start_time_unix_nano for name, span in spans.items()} == {
        "queue": 1_000,
        "prefill": 3_000,
        "decode": 4_000,
    }
    assert {span.parent_span_id for span in spans.values()} == {root.span_id}
    assert {span.trace_id for span in spans.values()} == {root.trace_id}
    told = {each.key: each.value.string_value or each.value.int_value for each in root.attributes}
    assert (told["gen_ai.request.model"], told["gen_ai.usage.output_tokens"], told["aegis.outcome"]) == (
        "m",
        1,
        "finished",
    )
    resource = {each.key: each.value.string_value for each in request.resource_spans[0].resource.attributes}
    assert (resource["service.name"], resource["service.instance.id"]) == ("aegis", "proxy-0")


def test_without_a_collector_nothing_is_imported() -> None:
    code = (
        "import sys, aegis.launcher.launch, proxy.live.process\n"
        "from aegis.telemetry.tracing import traced\n"
        "with traced(None, '') as stages: assert stages is None\n"
        "print([name for name in sys.modules if name.startswith(('aegis.telemetry.otlp', 'opentelemetry.exporter'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
