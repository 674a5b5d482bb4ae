"""The lengths of answers."""

from __future__ import annotations

from aegis.core.ids import ModelId
from aegis.core.model import Slo
from aegis.policies import recipe
from aegis.sim.gpu_costs import gpu
from aegis.sim.market import SimRequest
from aegis.sim.shapes import SHAPES
from aegis.sim.simulation import Pool, simulate

MODEL = ModelId("long")
SPEC = SHAPES["qwen2.5-7b"].spec(MODEL, Slo(ttft_ns=10**10, tbt_ns=10**8))


def test_every_token_that_was_wanted_is_made() -> None:
    """Answers had ended after 4 096, and what was missing had counted as late."""
    lengths = [1, 4095, 4096, 4097, 12_000, SPEC.manifest.context_tokens - 100]
    pool = Pool(recipe=recipe("least-slack"), gpu=gpu("h800"), specs=[SPEC], mixed=1)
    records = simulate(pool, [SimRequest(at, MODEL, 100, length) for at, length in enumerate(lengths)]).records
    assert sorted((each.output_tokens, each.on_time) for each in records) == [(n, n) for n in lengths]
