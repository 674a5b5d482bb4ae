"""A host without memory for KV: leases of slabs are refused, and requests are prefilled again, to the same end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.faults.figures import Figures
from tests.faults.pool import opened
from tests.faults.trial import nothing, undergo
from tests.live.cases import Case

HOST = ("--host-memory", "24MiB", "--model-cache", "16MiB")
"""Four slabs of KV, for two instances."""


@pytest.mark.long
def test_there_is_hardly_any(
    tmp_path: Path, cache: Path, checkpoints_dir: Path, tight_memory: str, some_cases: Sequence[Case], figures: Figures
) -> None:
    options = ["--models", str(checkpoints_dir), "--device-memory", tight_memory, "--prefill", "1", "--decode", "1"]
    with opened("embedded", tmp_path / "pool", cache, *options, *HOST) as pool:
        trial = undergo(pool.server, some_cases, 0.0, nothing)
        trial.verify()
        assert not trial.broken
        figures.add("no host memory for KV", trial)
        assert pool.server.wait_for_freed_memory().total("instance_given_up_total") > 0
        assert "Traceback" not in pool.server.output()
