"""Instruments that write a file say that they cannot before they measure."""

from collections.abc import Callable
from pathlib import Path

import pytest

from aegis.core.errors import UserError
from bench.lab import switching
from bench.lab.decode import beside_transformers, beside_vllm
from bench.lab.memory import suite as memory
from bench.lab.scheduling import suite as scheduling


@pytest.mark.parametrize(
    "run",
    [switching.run, beside_transformers.run, beside_vllm.run, memory.run, scheduling.run],
    ids=lambda run: run.__module__,
)
def test_a_file_that_cannot_be_written_is_said_before(
    run: Callable[[Path], object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"directory"):
        run(tmp_path / "file" / "a.json")
    assert capsys.readouterr().out == ""
