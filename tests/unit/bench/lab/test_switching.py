from pathlib import Path

import msgspec
import pytest

from bench.lab.switching import Result, TwoModels, run


def test_a_tiny_run_measures_every_column(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "switch.json"
    result = run(path, sizes=(2 << 20, 8 << 20), repetitions=2)
    assert msgspec.json.decode(path.read_bytes(), type=Result) == result
    assert [size.nbytes for size in result.sizes] == [2 << 20, 8 << 20]
    for size in result.sizes:
        numbers = (size.first_ns, size.switch_ns, size.memcpy_ns, size.fragmented_ns, size.prefetched_ns, size.ratio)
        assert min(numbers) > 0
        assert size.prefetched_bytes == 0
    assert "8MiB" in capsys.readouterr().out


def test_a_switch_brings_the_other_models_bytes() -> None:
    models = TwoModels(4 << 20, pages=4, fragmented=True)
    for switches, model in enumerate((0, 1, 0), start=1):
        models.switch_to(model)  # looks at the bytes itself
        assert models.loaded_bytes == switches * models.nbytes
    models.close()
