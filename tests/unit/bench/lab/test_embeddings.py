from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from bench.lab import embeddings


@pytest.mark.long
def test_a_small_run_has_all_figures_and_the_vectors_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sentence_transformers")
    monkeypatch.setenv("AEGIS_CACHE", str(tmp_path / "cache"))
    result = embeddings.run(tmp_path / "f.json", texts=8, rounds=1, layers=1)
    *_, ratio, difference = result.figures
    assert difference.ok and ratio.value > 0 and difference.value > 0
    assert msgspec.json.decode((tmp_path / "f.json").read_bytes(), type=embeddings.Result) == result
    assert "served ÷ sentence-transformers" in capsys.readouterr().out
