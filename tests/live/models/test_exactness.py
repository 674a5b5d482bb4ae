"""64 streams over eight models of which two fit: every token is what transformers' own greedy generate returns."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from tests.live.cases import Case
from tests.live.market import PROXIES
from tests.live.server import Server
from tests.live.streams import run_all

SWITCHES_MIN = PREEMPTIONS_MIN = 50
FIGURES = (
    "model_switches_total",
    "num_preemptions_total",
    "request_replays_total",
    "instance_prefetches_total",
    "instance_steps_total",
    "instance_given_up_total",
)


def test_64_streams_over_eight_models_are_what_transformers_generates(
    server: Server, cases: Sequence[Case], record_property: Callable[[str, object], None]
) -> None:
    before = server.metrics()
    started_s = time.monotonic()
    streams = run_all(server.url, [case.body for case in cases])
    duration_s = time.monotonic() - started_s
    after = server.wait_for_freed_memory()
    for case, stream in zip(cases, streams, strict=True):
        assert stream.error is None
        assert stream.tokens == case.expected.tokens, case.body
        assert stream.done
    assert len({stream.proxy for stream in streams}) == PROXIES
    seen = {name: after.total(name) - before.total(name) for name in FIGURES}
    seen |= {"kv_swap_" + d: after.total("kv_swap_bytes_total", direction=d) for d in ("in", "out")}
    seen |= {"seconds": round(duration_s, 1), "tokens": sum(len(stream.tokens) for stream in streams)}
    for name, figure in seen.items():
        record_property(name, figure)
    assert seen["model_switches_total"] >= SWITCHES_MIN
    assert seen["num_preemptions_total"] >= PREEMPTIONS_MIN
    for instance in after.instances():
        initialised = [metrics.total("engine_initialisations_total", instance=instance) for metrics in (before, after)]
        assert initialised[0] == initialised[1] >= 1
