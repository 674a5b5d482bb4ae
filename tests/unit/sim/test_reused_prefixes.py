"""What a workload says is reused need not be prefilled."""

from __future__ import annotations

import pytest

from aegis.policies import recipe
from aegis.sim.catalogue import models
from aegis.sim.gpu_costs import gpu
from aegis.sim.market import SimRequest
from aegis.sim.simulation import Pool, simulate
from aegis.telemetry.spans import SpanKind

(SPEC,) = models("qwen2.5-7b:1")


@pytest.mark.parametrize("policy", ["least-slack", "muxwise"])
@pytest.mark.parametrize(("reused", "prefilled"), [(0, 1000), (640, 360), (650, 360), (1000, 8), (5, 1000)])
def test_only_the_rest_is_prefilled(policy: str, reused: int, prefilled: int) -> None:
    """Whole blocks are reused, and the last token is always run."""
    pool = Pool(recipe=recipe(policy), gpu=gpu("h800"), specs=(SPEC,), mixed=1, keep_spans=True)
    outcome = simulate(pool, [SimRequest(0, SPEC.model, 1000, 5, reused_tokens=reused)])
    assert [record.ended for record in outcome.records] == ["finished"]
    assert sum(span.tokens for span in outcome.spans if span.kind is SpanKind.PREFILL) == prefilled
