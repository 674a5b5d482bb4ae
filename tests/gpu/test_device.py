"""The CUDA device on a GPU: what the model of the driver only claims."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import torch

from aegis.core.ids import PageRun
from aegis.core.request import EventHandle
from aegis.device.cuda.device import CudaDevice
from aegis.device.cuda.pool import CudaPool
from aegis.device.host_memory import SharedMemory
from aegis.device.protocol import Device
from aegis.device.shared_events import SharedWords

LONG_NS = 60_000_000_000

# Maps pages 0 and 1 of the pool, copies the first to the second once word 0 says so, and tells on word 20.
PEER = """
import sys
from aegis.core.ids import PageRun
from aegis.core.request import EventHandle
from aegis.device.cuda.device import CudaDevice
from aegis.device.shared_events import SharedWords
device = CudaDevice(sys.argv[2], SharedWords.open(sys.argv[1]), stream_words=[20])
device.grant([PageRun(0, 2)])
size = device.page_bytes
space = device.reserve(2 * size)
space.map(0, [PageRun(0, 2)])
stream = device.stream("peer")
stream.wait(EventHandle(0, 1))
event = stream.copy([(space.base + size, space.base, size)])
print("waiting", flush=True)
assert device.wait(event, timeout_ns=60_000_000_000)
if sys.argv[3] == "dies":
    import os
    os._exit(0)
device.close()
"""

TOUCH = """
import sys
from aegis.core.ids import PageRun
from aegis.device.cuda.device import CudaDevice
from aegis.device.cuda.pool import CudaPool
from aegis.device.shared_events import SharedWords
pool = CudaPool(8 << 20)
device = CudaDevice(pool.address, SharedWords.create(4))
device.grant([PageRun(0, 4)])
size = device.page_bytes
space = device.reserve(4 * size)
space.map(0, [PageRun(0, 2)])
space.unmap(1, 1)
stream = device.stream("s")
at = int(sys.argv[1])
event = stream.wipe([PageRun(3, 4)])
assert device.wait(event, timeout_ns=10**10)
import torch
from aegis.engine.tensor_views import tensor_at
tensor = tensor_at(space.base + at * size, (4,), torch.float32, torch.device("cuda"))
print("touching", flush=True)
print((tensor + 1).tolist() != [], flush=True)
"""


class Bytes:
    """Host memory to fill and look at pages through."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self._memory = SharedMemory.create(nbytes, "test")
        self._device = device
        self.region = device.open_host(self._memory.path, writable=True)
        self._stream = device.stream("test")

    def write(self, address: int, byte: int, nbytes: int) -> None:
        ctypes.memset(self.region.base, byte, nbytes)
        assert self._device.wait(self._stream.copy([(address, self.region.base, nbytes)]), timeout_ns=LONG_NS)

    def read(self, address: int, nbytes: int) -> bytes:
        assert self._device.wait(self._stream.copy([(self.region.base, address, nbytes)]), timeout_ns=LONG_NS)
        return ctypes.string_at(self.region.base, nbytes)


def test_pages_keep_their_bytes_wherever_they_are_mapped(device: CudaDevice) -> None:
    size = device.page_bytes
    host = Bytes(device, size)
    here, there = device.reserve(1 << 40), device.reserve(100 * size)
    here.map(5, [PageRun(10, 14), PageRun(0, 2)])
    for at, page in enumerate([10, 11, 12, 13, 0, 1], 5):
        host.write(here.base + at * size, page + 1, size)
    here.unmap(6, 4)
    there.map(90, [PageRun(0, 1), PageRun(11, 14)])
    for at, page in enumerate([0, 11, 12, 13], 90):
        assert host.read(there.base + at * size, size) == bytes([page + 1]) * size
    assert host.read(here.base + 5 * size, size) == bytes([11]) * size


def test_wiped_pages_are_zeros_and_can_be_revoked_at_once(device: CudaDevice) -> None:
    size = device.page_bytes
    host, space = Bytes(device, size), device.reserve(8 * size)
    space.map(0, [PageRun(0, 8)])
    for page in range(8):
        host.write(space.base + page * size, 7, size)
    space.unmap(0, 8)
    assert device.wait(device.stream("scrub").wipe([PageRun(1, 3), PageRun(6, 7)]), timeout_ns=LONG_NS)
    device.revoke([PageRun(1, 3)])
    device.grant([PageRun(1, 3)])
    space.map(0, [PageRun(0, 8)])
    zeros = [page for page in range(8) if host.read(space.base + page * size, size) == bytes(size)]
    assert zeros == [1, 2, 6]


def test_two_processes_share_pages_and_events(pool: CudaPool, words: SharedWords, device: CudaDevice) -> None:
    size = device.page_bytes
    space = device.reserve(2 * size)
    space.map(0, [PageRun(0, 2)])
    stream = device.stream("ours")
    assert stream.word == 0
    host = Bytes(device, size)
    host.write(space.base, 9, size)
    host.write(space.base + size, 1, size)
    command = [sys.executable, "-c", PEER, words.path, pool.address, "closes"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as peer:
        assert peer.stdout is not None
        assert peer.stdout.readline() == b"waiting\n"
        stream.copy([])
        stream.wait(EventHandle(20, 1))
        after = stream.copy([(host.region.base, space.base + size, size)])
        assert device.wait(after, timeout_ns=LONG_NS)
    assert peer.returncode == 0
    assert ctypes.string_at(host.region.base, size) == b"\x09" * size


def test_the_owner_wipes_what_a_lost_process_left(pool: CudaPool, words: SharedWords) -> None:
    words.store(0, 1)
    command = [sys.executable, "-c", PEER, words.path, pool.address, "dies"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    pool.wipe([PageRun(0, 2)])
    device = CudaDevice(pool.address, words, stream_words=[21, 22])
    device.grant([PageRun(0, 2)])
    space, host = device.reserve(2 * device.page_bytes), Bytes(device, device.page_bytes)
    space.map(0, [PageRun(0, 2)])
    for page in range(2):
        assert host.read(space.base + page * device.page_bytes, device.page_bytes) == bytes(device.page_bytes)
    device.close()


def test_an_abandoned_copy_ends_early_and_its_event_passes(device: CudaDevice) -> None:
    nbytes = 256 * device.page_bytes
    space, host = device.reserve(nbytes), Bytes(device, nbytes)
    space.map(0, [PageRun(0, 256)])
    stream = device.stream("weights")
    whole = stream.copy([(space.base, host.region.base, nbytes)] * 8)
    stream.abandon(whole)
    after = stream.copy([(space.base, host.region.base, 1)])
    assert device.wait(after, timeout_ns=LONG_NS)
    assert device.passed(whole)


def test_touching_an_unmapped_page_is_an_error() -> None:
    for page, ends_well in ((0, True), (1, False)):
        done = subprocess.run([sys.executable, "-c", TOUCH, str(page)], capture_output=True, text=True)
        assert done.stdout.startswith("touching\n")
        assert (done.returncode == 0) == ends_well
        assert ends_well or "illegal memory access" in done.stderr


def test_host_memory_is_page_locked(device: CudaDevice) -> None:
    memory = SharedMemory.create(64 << 20, "test")
    assert device.open_host(memory.path, writable=True).pinned
    assert device.open_host(memory.path, writable=False, populate=False).pinned
    memory.close()


def test_lanes_compute_beside_each_other_with_the_multiprocessors_of_their_shares(device: CudaDevice) -> None:
    """A product that fills the GPU takes as many times as long as the lane is smaller, and two lanes give what each
    gives alone."""
    factor = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    expected = factor @ factor
    divisions = device.partitions()[1:]
    assert divisions, "this GPU, or its driver, has no green contexts"
    lanes = device.lanes(min(divisions, key=lambda shares: abs(shares[0] - 250)))
    streams = [torch.cuda.ExternalStream(lane.stream) for lane in lanes]  # type: ignore[no-untyped-call]

    def seconds(stream: torch.cuda.Stream) -> float:
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(stream):
            for _ in range(3):
                factor @ factor
            start.record(stream)
            for _ in range(20):
                factor @ factor
            stop.record(stream)
        stop.synchronize()
        return start.elapsed_time(stop) / 1e3

    alone = seconds(torch.cuda.Stream())  # type: ignore[no-untyped-call]
    assert seconds(streams[0]) > 0.7 * alone * 1000 / lanes[0].share
    results = []
    torch.cuda.synchronize()
    for stream in streams:
        with torch.cuda.stream(stream):
            results.append(factor @ factor)
    torch.cuda.synchronize()
    for result in results:  # with fewer multiprocessors sums may be split elsewhere
        torch.testing.assert_close(result, expected, rtol=0.05, atol=1.0)
    for lane in lanes:
        lane.close()
