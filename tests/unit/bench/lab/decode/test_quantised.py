from __future__ import annotations

from pathlib import Path

import msgspec

from bench.lab.decode.quantised import KINDS, Plan, Result, run


def test_a_tiny_run_measures_every_kind(tmp_path: Path) -> None:
    path = tmp_path / "quantised.json"
    plan = Plan(checkpoint="tiny", batches=(1, 2), context=8, tokens=3, prompt=16, runs=1, switches=1)
    result = run(path, plan)
    assert msgspec.json.decode(path.read_bytes(), type=Result) == result
    assert [kind.weights for kind in result.kinds] == list(KINDS)
    assert all(len(kind.tokens_per_s) == 2 and min(kind.tokens_per_s) > 0 for kind in result.kinds)
    dense, eight, four = (kind.image_bytes for kind in result.kinds)
    assert dense > eight > four
    assert len(result.figures) == 2 * (len(plan.batches) + 3)
