import ctypes
import os
import threading
from pathlib import Path

import pytest

from aegis.core.ids import PageRun
from aegis.device.cpu.device import CpuDevice
from aegis.device.cpu.pool import CpuPool
from aegis.device.host_memory import SharedMemory
from aegis.device.protocol import Device
from aegis.device.shared_events import SharedWords

LONG_NS = 60_000_000_000


def held() -> tuple[int, int, int]:
    """Mappings of ours, file descriptors and threads of this process."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    ours = [line for line in maps if "aegis-" in line or " ---p 00000000 00:00 0" in line]
    return len(ours), len(os.listdir("/proc/self/fd")), threading.active_count()  # noqa: PTH208


def use_everything(pool: CpuPool, words: SharedWords) -> None:
    device: Device = CpuDevice(pool.address, words)
    device.grant([PageRun(0, 6)])
    memory = SharedMemory.create(4 << 20, "image")
    image = device.open_host(memory.path, writable=True)
    weights = device.reserve(1 << 30)
    weights.map(0, [PageRun(5, 6), PageRun(2, 3)])
    weights.map(9, [PageRun(0, 1)])
    ctypes.memset(image.base, 1, image.nbytes)
    loads, swaps = device.stream("weights"), device.stream("swap")
    swaps.wait(loads.copy([(weights.base, image.base, image.nbytes)]))
    swaps.copy([(weights.base + 9 * (2 << 20), weights.base, 1 << 20)])
    event = swaps.wipe([PageRun(3, 5)])
    assert device.wait(event, timeout_ns=LONG_NS)
    assert ctypes.string_at(weights.base + 9 * (2 << 20) + (1 << 20) - 1, 1) == b"\1"
    device.revoke([PageRun(3, 5)])
    device.close()
    memory.close()
    for stream in (loads, swaps):
        words.store(stream.word, 0)


def test_closing_gives_everything_back(pool: CpuPool, words: SharedWords) -> None:
    use_everything(pool, words)
    before = held()
    for _ in range(3):
        use_everything(pool, words)
    assert held() == before


def test_closed_regions_are_forgotten_and_open_ones_closed(pool: CpuPool, words: SharedWords, tmp_path: Path) -> None:
    path = tmp_path / "image"
    path.write_bytes(b"x")
    device = CpuDevice(pool.address, words)
    for _ in range(5):
        device.open_host(str(path), writable=False).close()
    last = device.open_host(str(path), writable=False)
    assert device._regions == {last}
    device.close()
    assert not last.base


def test_streams_take_the_words_they_were_given(pool: CpuPool, words: SharedWords) -> None:
    device = CpuDevice(pool.address, words, stream_words=[9, 4])
    assert [device.stream("a").word, device.stream("b").word] == [9, 4]
    with pytest.raises(IndexError):
        device.stream("c")
    device.close()
