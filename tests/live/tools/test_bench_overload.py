"""The benchmark of live overload, in small: every figure is there. How fast anything was is not judged."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from bench.overload.suite import Result, Setting, run


@pytest.mark.long
def test_the_benchmark_loads_a_server_and_watches_it(tmp_path: Path) -> None:
    setting = Setting(
        seconds=3,
        search_s=2,
        lead_s=1,
        seed=0,
        rps=0.5,
        contenders=["least-slack, refusing"],
        factors=(1.0,),
        launch=(),
    )
    result = run(setting, tmp_path / "overload_live.json")
    (only,) = result.runs
    assert only.saw.sent and not only.saw.failed and only.saw.tokens_per_s > 0
    assert only.health.times > 5 and only.metrics.times and only.cancels.times
    assert 0 < only.start.own <= only.peak.own and 0 < only.instance_cpu < only.server_cpu
    assert msgspec.json.decode((tmp_path / "overload_live.json").read_bytes(), type=Result) == result
