"""The simulator's figures are told, of markets of the sizes asked for. How fast it was is not judged."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from bench.simulator import Result, Size, run


def test_speed_and_growth_are_told_beside_their_limits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, sizes = tmp_path / "simulator.json", [Size(4, 8, 40), Size(8, 16, 80), Size(10, 24, 200)]
    result = run(path, first=sizes[0], scales=sizes[1:], repetitions=2)
    assert msgspec.json.decode(path.read_bytes(), type=Result) == result
    assert [case.size for case in result.cases] == sizes
    assert [case.requests for case in result.cases] == pytest.approx([40, 80, 200], rel=0.5)
    speed, growth = result.figures
    assert speed.value == pytest.approx(result.cases[0].requests / result.cases[0].process_s)
    assert growth.value == pytest.approx(result.cases[2].each_us / result.cases[1].each_us)
    shown = capsys.readouterr().out
    assert "8 × 16 × 80" in shown and "≥ 10000" in shown and "at 10 × 24 × 200, over that at 8 × 16 × 80" in shown
