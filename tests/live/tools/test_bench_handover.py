"""The benchmark of hand-overs, in small: each way of copying brings the bytes, and the result can be read again."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.live.market import RAY

pytest.importorskip("ray")

from bench.lab.cluster.handover import Result, run


@pytest.mark.skipif(not RAY, reason="takes half a minute; make test-ray runs it")
def test_the_benchmark_measures_each_way(tmp_path: Path) -> None:
    result = run(tmp_path / "handover.json", sizes_mib=(1,), rounds=1)
    names = [figure.name for figure in result.figures]
    assert names[:3] == ["1 MiB, plain socket", "1 MiB, hand-over", "1 MiB, object store"]
    assert all(figure.value > 0 for figure in result.figures)
    assert msgspec.json.decode((tmp_path / "handover.json").read_bytes(), type=Result) == result
