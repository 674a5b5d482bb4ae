"""Tests that need an NVIDIA GPU: `make test-gpu`. Elsewhere each is skipped and says why. Not run on a GPU yet."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from aegis.core.ids import PageRun
from aegis.device.cuda.device import CudaDevice
from aegis.device.cuda.pool import CudaPool
from aegis.device.shared_events import SharedWords
from bench.lab.gpu.suite import why_no_gpu

POOL_BYTES = 1 << 30
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if HERE in item.path.parents]
    if not here:
        return
    reason = why_no_gpu()
    for item in here:
        item.add_marker(pytest.mark.gpu)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=f"no usable GPU: {reason}"))


@pytest.fixture
def words() -> Iterator[SharedWords]:
    words = SharedWords.create(32)
    yield words
    words.close()


@pytest.fixture
def pool() -> Iterator[CudaPool]:
    pool = CudaPool(POOL_BYTES)
    yield pool
    pool.close()


@pytest.fixture
def device(pool: CudaPool, words: SharedWords) -> Iterator[CudaDevice]:
    """All pages are its own. At the end it must have stopped the GPU never."""
    device = CudaDevice(pool.address, words, stream_words=range(16))
    device.grant([PageRun(0, device.page_count)])
    yield device
    assert device.device_wide == 0
    device.close()
