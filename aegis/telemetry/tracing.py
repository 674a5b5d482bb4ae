"""Traces where they are wanted; where they are not, nothing of them is imported or kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from aegis.telemetry.request_stages import RequestStages


@contextmanager
def traced(url: str | None, proxy: str) -> Iterator[RequestStages | None]:
    """The traces of a proxy's requests, which go to the collector at `url`. All are sent when the context ends. Raises
    UserError if the packages for it are not installed."""
    if url is None:
        yield None
        return
    from aegis.telemetry.otlp import Traces

    traces = Traces(url, proxy)
    try:
        yield RequestStages(traces.ended)
    finally:
        traces.close()
