"""A small CPU device and the words of its streams."""

from collections.abc import Iterator

import pytest

from aegis.device.cpu import CpuDevice
from aegis.device.shared_words import SharedWords


@pytest.fixture
def words() -> Iterator[SharedWords]:
    words = SharedWords.create(16)
    yield words
    words.close()


@pytest.fixture
def device(words: SharedWords) -> Iterator[CpuDevice]:
    device = CpuDevice(32 << 20, words)
    yield device
    device.close()
