from __future__ import annotations

from collections.abc import Callable

import pytest
from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

from aegis.models.sources import bar


@pytest.mark.parametrize("bars", [disable_progress_bars, enable_progress_bars])
def test_bytes_are_told_and_nothing_is_drawn(bars: Callable[[], None]) -> None:
    bars()
    told: list[str] = []
    kind = bar(told.append)
    with kind(total=64 << 20, unit="B", unit_scale=True, mininterval=0) as progress:
        progress.update(16 << 20)
        progress.update(48 << 20)
    with kind(total=3, unit="it", mininterval=0) as files:
        files.update(3)
    assert "downloading, 16 of 64 MiB" in told
    assert told[-1] == "downloading, 64 of 64 MiB"


def test_of_no_bytes_nothing_is_told() -> None:
    told: list[str] = []
    with bar(told.append)(total=0, unit="B", mininterval=0):
        pass
    assert told == []
