"""Processes of instances that have several: one that is killed ends its instance, whose requests go on elsewhere.

AEGIS_TEST_RANKS=2 makes a market of it that two can share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.faults.figures import Figures
from tests.faults.pool import Pool, opened
from tests.faults.test_instances import kill
from tests.live.cases import Case
from tests.live.market import RANKS

pytestmark = pytest.mark.skipif(RANKS < 2, reason="AEGIS_TEST_RANKS=2 runs these")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory, cache: Path, checkpoints_dir: Path) -> Iterator[Pool]:
    options = ["--models", str(checkpoints_dir), "--device-memory", "64MiB", "--mixed", "2"]
    directory = tmp_path_factory.mktemp("pairs")
    with opened("embedded", directory, cache, *options, "--tensor-parallel-size", str(RANKS)) as running:
        yield running


@pytest.mark.parametrize("rank", ["mixed-0/1", pytest.param("mixed-1", marks=pytest.mark.long)])
def test_one_is_killed(pairs: Pool, some_cases: Sequence[Case], moment: float, rank: str, figures: Figures) -> None:
    kill(pairs, some_cases, moment, rank, figures)
    pairs.server.wait_for_ready()
    pairs.server.wait_for_freed_memory()
    assert "Traceback" not in pairs.server.output()
