"""`aegis lab start` and `aegis lab pace`, small: they run, and have every figure. How fast it was is not judged."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from bench.lab import pace, start

pytestmark = pytest.mark.long


@pytest.fixture
def options(cache: Path, checkpoints_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Sequence[str]:
    monkeypatch.setenv("AEGIS_CACHE", str(cache))
    models = [str(checkpoints_dir / name) for name in ("llama", "qwen3")]
    return ["--device-memory", "64MiB", "--mixed", "1", "--models", models[0], "--models", models[1]]


def test_a_start_and_a_recovery_are_measured(tmp_path: Path, options: Sequence[str]) -> None:
    path = tmp_path / "start.json"
    result = start.run(path, kills=1, streams=2, options=options, steady_s=0)
    assert 0 < result.start.ready_s < result.start.first_token_s
    assert result.start.processor_s > 1 and result.start.memory_bytes > 100 << 20
    (recovery,) = result.recoveries
    assert recovery.instance == "mixed-0" and 0 < recovery.process_s <= recovery.serves_s
    assert len(result.figures) == 9
    assert msgspec.json.decode(path.read_bytes(), type=start.Result) == result


@pytest.mark.long
def test_gaps_of_both_paces_are_measured(tmp_path: Path, options: Sequence[str]) -> None:
    path, trace = tmp_path / "pace.json", tmp_path / "pace.jsonl"
    result = pace.run(path, streams=2, window_s=4, rounds=1, options=options, trace=trace)
    made, smooth = result.gaps
    assert (made.pace, smooth.pace) == ("made", "smooth")
    assert made.tokens > 2 and smooth.tokens > 2
    assert smooth.p50_ms >= 80, "a TBT, but for what the client's own clock is off"
    assert msgspec.json.decode(path.read_bytes(), type=pace.Result) == result
    streams = msgspec.json.Decoder(pace.Stream).decode_lines(trace.read_bytes())
    assert {each.pace for each in streams} == {"made", "smooth"} and len(streams) >= 4
