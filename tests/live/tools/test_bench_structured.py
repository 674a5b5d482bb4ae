"""`aegis lab structured`, small: it runs, and every answer satisfies its schema. How fast it was is not judged."""

from pathlib import Path

import msgspec
import pytest

from bench.lab.structured_output import Result, run


@pytest.mark.long
def test_answers_are_held_to_schemas_and_latencies_compared(
    tmp_path: Path, cache: Path, checkpoints_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AEGIS_CACHE", str(cache))
    json = tmp_path / "structured.json"
    options = ["--models", str(checkpoints_dir / "llama"), "--models", str(checkpoints_dir / "qwen3")]
    result = run(json, batch=2, rounds=1, schemas=6, options=options)
    assert [len(rounds) for rounds in (result.held, result.free)] == [2, 2]
    assert all(each.itl_s > 0 for each in (*result.held, *result.free))
    assert len(result.answers) == 6
    assert all(answer.valid or answer.cut for answer in result.answers)
    assert {figure.name: figure.ok for figure in result.figures}["of the others, those that satisfy their schema"]
    assert msgspec.json.decode(json.read_bytes(), type=Result) == result
