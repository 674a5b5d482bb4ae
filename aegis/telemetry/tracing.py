"""Traces where they are wanted; where they are not, nothing of them is imported or kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from aegis.telemetry.request_stages import RequestStages


@contextmanager
def traced(url: str | None, proxy: str) -> Iterator[RequestStages | None]:
    """What a proxy is to tell of its requests, to be sent to the collector at `url`. On leaving all is sent. Raises
    UserError where the packages for it are not installed."""
    if url is None:
        yield None
        return
    from aegis.telemetry.otlp import Traces

    traces = Traces(url, proxy)
    try:
        yield RequestStages(traces.ended)
    finally:
        traces.close()
