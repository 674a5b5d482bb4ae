"""A small CPU device, which was granted all of its pool, and the words of its streams."""

from collections.abc import Iterator

import pytest

from aegis.core.ids import PageRun
from aegis.device.cpu.device import CpuDevice
from aegis.device.cpu.pool import CpuPool
from aegis.device.shared_events import SharedWords


@pytest.fixture
def words() -> Iterator[SharedWords]:
    words = SharedWords.create(16)
    yield words
    words.close()


@pytest.fixture
def pool() -> Iterator[CpuPool]:
    pool = CpuPool(32 << 20, ahead_pages=0)
    yield pool
    pool.close()


@pytest.fixture
def device(pool: CpuPool, words: SharedWords) -> Iterator[CpuDevice]:
    device = CpuDevice(pool.address, words)
    device.grant([PageRun(0, device.page_count)])
    yield device
    device.close()
