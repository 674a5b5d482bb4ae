"""The time in which instances change the model, and KV moves (Aegaeon §7.3, Figure 15)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from msgspec import Struct

from aegis.core.clock import NS_PER_MS
from aegis.sim.simulation import Outcome
from aegis.telemetry.spans import SpanKind
from bench.common.percentiles import percentile
from bench.simulate.setting import Setting, pool_of, run

PERCENTS = tuple(range(1, 101))


class Distribution(Struct, frozen=True):
    """`cdf_ms[k]`: k + 1 per cent took no longer."""

    count: int
    cdf_ms: tuple[float, ...]


class Switching(Struct, frozen=True):
    """By shape of the model: whole switches (room, copy, KV of the first request, what a switch takes beside). Copies
    of one request's KV, one way, are all together."""

    switches: dict[str, Distribution]
    prefetched: float  # share of the switches
    kv_copies: Distribution


def measure(setting: Setting) -> Switching:
    """Raises UserError."""
    pool = pool_of(setting)
    return switching(run(setting), {spec.model: spec.root for spec in pool.specs}, pool.gpu_as_wanted().switch_ns)


def switching(outcome: Outcome, roots: Mapping[str, str], overhead_ns: int) -> Switching:
    """`roots`: the shape of each model."""
    by_root: defaultdict[str, list[int]] = defaultdict(list)
    for done in outcome.switches:
        by_root[roots[done.model]].append(done.duration_ns + overhead_ns)
    moves = [s.stop_ns - s.start_ns for s in outcome.spans if s.kind in (SpanKind.SWAP_IN, SpanKind.SWAP_OUT)]
    return Switching(
        switches={root: _distribution(by_root[root]) for root in sorted(by_root)},
        prefetched=round(sum(s.prefetched for s in outcome.switches) / max(len(outcome.switches), 1), 6),
        kv_copies=_distribution(moves),
    )


def _distribution(durations_ns: Sequence[int]) -> Distribution:
    ordered = sorted(durations_ns)
    steps = [percentile(ordered, percent) for percent in PERCENTS]
    return Distribution(len(ordered), tuple(round(step / NS_PER_MS, 3) for step in steps if step is not None))
