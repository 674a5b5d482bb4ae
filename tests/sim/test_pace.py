"""What a reader sees of a market whose models take turns on one simulated GPU, which holds half of them.

Tokens as the schedulers make them, and as `SmoothPace` has them leave. A gap counts where the token behind it was made
on time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from aegis.core.clock import NS_PER_MS, NS_PER_S
from aegis.core.model import ModelSpec, Slo
from aegis.policies import recipe
from aegis.sim.catalogue import models
from aegis.sim.gpu_costs import GPUS
from aegis.sim.market import SimRequest
from aegis.sim.simulation import Pool, simulate
from proxy.http.streaming.pace import SmoothPace

STREAMS, TOKENS = 16, 600
MADE_GAP_NS = NS_PER_S
_COPIED_PER_S = 8 * 10**12  # a switch takes a fraction of a step, as with the small models of the demo market


def _streams(specs: Sequence[ModelSpec]) -> list[tuple[int, list[int]]]:
    """When each arrived, and when its tokens were made."""
    half = sum(spec.manifest.image_bytes for spec in specs) // 2
    gpu = replace(GPUS["h800"], memory_bytes=half, switch_ns=0, copy_ns=0, host_bytes_per_s=0)
    gpu = replace(gpu, in_bytes_per_s=_COPIED_PER_S, out_bytes_per_s=_COPIED_PER_S)
    pool = Pool(recipe=recipe("least-slack"), gpu=gpu, specs=tuple(specs), mixed=1, keep_times=True)
    asked = [SimRequest((n + 1) * NS_PER_MS, specs[n % len(specs)].model, 64, TOKENS) for n in range(STREAMS)]
    return [(record.arrival_ns, list(record.token_times_ns)) for record in simulate(pool, asked).records]


def _left(slo: Slo, arrival_ns: int, made_ns: Sequence[int]) -> list[int]:
    pace, left, coming, now_ns = SmoothPace[int](slo, arrival_ns), list[int](), list(made_ns), 0
    while coming or pace.waits:
        moments = [*coming[:1], *([max(pace.next_ns, now_ns)] if pace.waits else [])]
        now_ns = min(moments)
        while coming and coming[0] <= now_ns:
            pace.made(0, tokens=1, now_ns=coming.pop(0))
        left += [now_ns] * len(pace.leaving(now_ns))
    return left


def _p99(gaps_ns: list[int]) -> int:
    return sorted(gaps_ns)[len(gaps_ns) * 99 // 100]


@pytest.mark.parametrize("tbt_ms", [110, 60], ids=["all are on time", "an eighth is late"])
def test_smooth_streams_have_no_gaps_while_they_are_on_time(tbt_ms: int) -> None:
    slo = Slo(tbt_ns=tbt_ms * NS_PER_MS)
    made_gaps, smooth_gaps = list[int](), list[int]()
    for arrival_ns, made_ns in _streams(models("mix:8", slo=slo)):
        left_ns = _left(slo, arrival_ns, made_ns)
        in_time = [at_ns <= slo.due_ns(arrival_ns, at) for at, at_ns in enumerate(made_ns)]
        for times_ns, gaps in ((made_ns, made_gaps), (left_ns, smooth_gaps)):
            gaps += [b - a for (a, b), counts in zip(pairwise(times_ns), in_time[1:], strict=True) if counts]
    assert _p99(made_gaps) >= MADE_GAP_NS
    assert _p99(smooth_gaps) <= 1.5 * slo.tbt_ns
