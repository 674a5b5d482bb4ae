"""The simulator's figures are told, of markets of the sizes asked for. How fast it was is not judged."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from bench.lab.scheduling.simulator_speed import Result, Size, run


@pytest.mark.long
def test_speed_and_growth_are_told_beside_their_limits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, first, scales = tmp_path / "simulator.json", Size(4, 8, 40), [Size(8, 16, 80), Size(9, 24, 120)]
    result = run(path, first=first, scales=scales, repetitions=2)
    assert msgspec.json.decode(path.read_bytes(), type=Result) == result
    assert [case.size for case in result.cases] == [first, scales[0], Size(6, 16, 120), scales[1]]
    assert [case.requests for case in result.cases] == pytest.approx([40, 80, 120, 120], rel=0.5)
    speed, same, growth = result.figures
    assert speed.value == pytest.approx(result.cases[0].requests / result.cases[0].process_s)
    assert same.value == 1
    assert growth.value == pytest.approx(result.cases[3].each_us / result.cases[2].each_us)
    shown = capsys.readouterr().out
    assert "8 × 16 × 80" in shown and "≥ 10000" in shown and "at 9 × 24 × 120, over that at 6 × 16 × 120" in shown


def test_a_market_is_measured_beside_a_small_one_of_its_kind() -> None:
    assert Size(300, 100, 100_000).small == Size(48, 16, 10_000)
    assert Size(10, 16, 50).small == Size(10, 16, 50)
