"""The benchmarks that serve run, small, and what they return adds up. How fast anything was is not judged."""

from pathlib import Path

import pytest

from aegis.models.sources import read_sources
from bench.lab.memory.churn import churn
from bench.lab.memory.fragmentation import fragmentation
from bench.lab.memory.page_transfer_live import handing_live
from bench.lab.memory.sharing import sharing
from bench.lab.memory.slab_replay import Load


@pytest.mark.long
def test_handing_memory_between_serving_instances() -> None:
    measured = handing_live(192 << 20, repetitions=3, streams=1)  # a model that does not fit in the slack
    assert (measured.nbytes, measured.repetitions, measured.streams) == (192 << 20, 3, 2)
    assert 0 < measured.given_ns < measured.total_ns <= measured.total_max_ns
    assert measured.late_ns <= measured.late_max_ns


@pytest.mark.long
def test_sharing_one_device() -> None:
    measured = sharing(clients=6, rounds=1)
    for arm in (measured.shared, measured.apart, measured.halves):
        assert arm.failed == 0
        assert 0 < arm.peak <= 1
        assert arm.tokens_per_s > 0
    assert measured.apart.ratio == 1


@pytest.fixture
def _in(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AEGIS_CACHE", str(cache))


@pytest.mark.long
@pytest.mark.usefixtures("_in")
def test_fragmentation_under_load(checkpoints_dir: Path) -> None:
    measured = fragmentation(8.0, Load(concurrent=6), sources=read_sources([str(checkpoints_dir)]))
    assert measured.failed == 0
    assert 0 < measured.waste.shared < 1
    assert 0 < measured.waste.held_bytes <= measured.waste.held_max_bytes


@pytest.mark.long
@pytest.mark.usefixtures("_in")
def test_churn(checkpoints_dir: Path) -> None:
    measured = churn(20, 20, 8, sources=read_sources([str(checkpoints_dir)]))
    assert measured.preemptions >= 20 and measured.moves >= 20
    assert (measured.failed, measured.restarts) == (0, 0)
    assert measured.given_bytes >= 20 * (2 << 20)
