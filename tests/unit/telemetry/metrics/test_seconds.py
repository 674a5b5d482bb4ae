"""Histograms show what prometheus_client's own would."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics, generate_latest

from aegis.telemetry.metrics.seconds import SecondsByLabel

BOUNDS = (0.001, 0.5, 1, 2.5, 960)


@given(st.lists(st.tuples(st.sampled_from(["a", '"b\\']), st.one_of(st.sampled_from(BOUNDS), st.floats(0, 2000)))))
def test_what_is_observed_is_shown_as_prometheus_client_shows_it(observed: list[tuple[str, float]]) -> None:
    disable_created_metrics()  # type: ignore[no-untyped-call]
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    seconds = SecondsByLabel("wait_seconds", "Waits", "model", BOUNDS, registry=ours)
    histogram = Histogram("wait_seconds", "Waits", ["model"], buckets=BOUNDS, registry=theirs)
    for model, value in observed:
        seconds.of(model).observe(value)
        histogram.labels(model).observe(value)
    assert generate_latest(ours) == generate_latest(theirs)
