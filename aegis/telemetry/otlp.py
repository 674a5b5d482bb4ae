"""Requests as OpenTelemetry traces, over OTLP and HTTP; needs the extra `otel`. Nothing else imports its packages,
and this is imported only where traces are wanted.

A request is a trace: a span named after its model, and below it one for each stage of its life.
"""

from __future__ import annotations

import time

import aegis
from aegis.core.errors import UserError, install_advice
from aegis.telemetry.request_stages import EndedRequest

_EXTRA = f"--otlp needs more packages; {install_advice('otel')}"


class Traces:
    """Sends what has ended in batches, from a thread of its own; a collector that is away costs traces and no more."""

    def __init__(self, url: str, proxy: str) -> None:
        """`url` is a collector's, like http://127.0.0.1:4318. Raises UserError if the packages are not installed."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError:
            raise UserError(_EXTRA) from None
        about = {"service.name": "aegis", "service.version": aegis.__version__, "service.instance.id": proxy}
        self._provider = TracerProvider(resource=Resource.create(about), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{url.rstrip('/')}/v1/traces")))
        self._tracer = self._provider.get_tracer("aegis", aegis.__version__)
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def ended(self, lived: EndedRequest) -> None:
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        root = self._tracer.start_span(
            f"request {lived.model}", start_time=self._offset_ns + lived.start_ns, attributes=_attributes(lived)
        )
        within = set_span_in_context(root)
        for stage in lived.stages:
            span = self._tracer.start_span(
                stage.name.value,
                within,
                start_time=self._offset_ns + stage.start_ns,
                attributes={"aegis.tokens": stage.tokens},
            )
            span.end(self._offset_ns + stage.stop_ns)
        if lived.how == "failed":
            root.set_status(Status(StatusCode.ERROR))
        root.end(self._offset_ns + lived.stop_ns)

    def close(self) -> None:
        """Sends what is left; waits for it, for some seconds at most."""
        self._provider.shutdown()


def _attributes(lived: EndedRequest) -> dict[str, str | int]:
    """The attributes of a request, by OpenTelemetry's conventions for generative AI as far as there are any."""
    return {
        "gen_ai.request.model": lived.model,
        "gen_ai.usage.input_tokens": lived.prompt_tokens,
        "gen_ai.usage.output_tokens": lived.tokens,
        "aegis.request": int(lived.request),
        "aegis.outcome": lived.how,
        "aegis.tokens_on_time": lived.on_time,
    }
