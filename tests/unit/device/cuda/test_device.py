"""The CUDA device over a model of the driver: what it holds, what it gives back, and that it stops no device."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from aegis.core.errors import UserError
from aegis.core.ids import PageRun
from aegis.core.request import EventHandle
from aegis.device.cuda.device import CudaDevice
from aegis.device.cuda.driver import DEVICE_WIDE, CudaError, Driver
from aegis.device.cuda.pool import CudaPool
from aegis.device.host_memory import SharedMemory
from aegis.device.protocol import Device, PhysicalPool
from aegis.device.shared_events import SharedWords
from tests.live.server import eventually
from tests.unit.device.cuda_driver_model import DriverModel
from tests.unit.device.cuda_parts import LONG_NS, PAGE, Rig

# Maps pages 0 and 1 of the pool, copies the first to the second once word 0 says so, and tells on word 1.
PEER = """
import sys
from aegis.core.ids import PageRun
from aegis.core.request import EventHandle
from aegis.device.cuda.device import CudaDevice
from aegis.device.cuda.driver import Driver
from aegis.device.shared_events import SharedWords
from tests.unit.device.cuda_driver_model import DriverModel
device = CudaDevice(sys.argv[2], SharedWords.open(sys.argv[1]), stream_words=[1], driver=Driver(DriverModel()))
device.grant([PageRun(0, 2)])
space = device.reserve(4 << 20)
space.map(0, [PageRun(0, 2)])
stream = device.stream("peer")
stream.wait(EventHandle(0, 1))
event = stream.copy([(space.base + (2 << 20), space.base, 2 << 20)])
print("waiting", flush=True)
device.wait(event, timeout_ns=60_000_000_000)
device.close()
"""


@pytest.fixture
def rig(words: SharedWords) -> Iterator[Rig]:
    rig = Rig(words)
    yield rig
    rig.close()


def use_everything(rig: Rig) -> None:
    pool: PhysicalPool = rig.pool
    opened = rig.open(granted=[PageRun(0, 7)])
    device: Device = opened
    memory = SharedMemory.create(2 * PAGE, "image")
    image = device.open_host(memory.path, writable=True)
    weights = device.reserve(1 << 30)
    weights.map(0, [PageRun(5, 6), PageRun(2, 3)])
    weights.map(9, [PageRun(0, 1)])
    ctypes.memset(image.base, 1, image.nbytes)
    loads, swaps, scrub = device.stream("weights"), device.stream("swap"), device.stream("scrub")
    swaps.wait(loads.copy([(weights.base, image.base, image.nbytes)]))
    assert device.wait(swaps.copy([(weights.base + 9 * PAGE, weights.base, PAGE // 2)]), timeout_ns=LONG_NS)
    assert ctypes.string_at(weights.base + 9 * PAGE + PAGE // 2 - 1, 2) == b"\1\0"
    weights.unmap(0, 2)
    assert device.wait(scrub.wipe([PageRun(2, 3), PageRun(5, 6)]), timeout_ns=LONG_NS)
    device.revoke([PageRun(2, 3), PageRun(5, 6)])
    assert opened.device_wide == 0
    opened.close()
    rig.devices.remove(opened)
    memory.close()
    assert pool.page_count == 16
    for stream in (loads, swaps, scrub):
        rig.words.store(stream.word, 0)


def held() -> tuple[int, set[threading.Thread]]:
    """File descriptors and threads of this process, once the pool has noticed the processes that left."""
    while any(thread.name == "gpu handles of a process" for thread in threading.enumerate()):
        threading.Event().wait(0.001)
    return len(os.listdir("/proc/self/fd")), set(threading.enumerate())  # noqa: PTH208


def test_closing_gives_everything_back(rig: Rig) -> None:
    use_everything(rig)
    files, threads = held()
    for _ in range(3):
        use_everything(rig)
    eventually(lambda: held()[1] <= threads, "no thread is new; one of another test may have ended")
    assert held()[0] == files
    for model in rig.models:
        assert set(model.held().values()) == {0}


def test_the_owner_needs_no_context_and_gives_all_handles_back(words: SharedWords) -> None:
    model = DriverModel()
    pool = CudaPool(5 * PAGE + 7, driver=Driver(model))
    assert (pool.page_count, pool.page_bytes) == (5, PAGE)
    assert model.held()["handles"] == 5
    assert "cuDevicePrimaryCtxRetain" not in model.calls
    pool.close()
    assert set(model.held().values()) == {0}
    with pytest.raises(UserError, match="cannot be reached"):
        CudaDevice(pool.address, words, driver=Driver(DriverModel()))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_the_pool_is_its_users_alone(rig: Rig) -> None:
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    os.seteuid(65534)
    try:
        stranger.connect(f"\0{rig.pool.address}")
    finally:
        os.seteuid(0)
    assert stranger.recv(100) == b""
    stranger.close()


def test_a_gpu_that_is_too_full_says_how_much_it_has() -> None:
    model = DriverModel(capacity_bytes=3 * PAGE)
    with pytest.raises(UserError, match="has 6 MiB free, not the 8 MiB"):
        CudaPool(4 * PAGE, driver=Driver(model))
    assert model.held()["handles"] == 0


def test_a_gpu_whose_memory_cannot_be_shared_says_why() -> None:
    """As a virtual one may be."""
    model = DriverModel()
    model.failing["cuMemGetAllocationGranularity"] = 1
    with pytest.raises(
        UserError, match="GPU 0 has no memory that processes can share: cuMemGetAllocationGranularity: C"
    ):
        CudaPool(4 * PAGE, driver=Driver(model))


def test_less_than_a_page_is_refused() -> None:
    with pytest.raises(UserError, match="at least 2097152 bytes, not 1000"):
        CudaPool(1000, driver=Driver(DriverModel()))


def test_a_gpu_that_is_not_there_is_the_users_to_mend() -> None:
    with pytest.raises(UserError, match="no usable GPU 3: cuDeviceGet: CUDA_ERROR_INVALID_DEVICE"):
        CudaPool(PAGE, ordinal=3, driver=Driver(DriverModel()))


def test_what_one_device_wrote_another_reads_when_the_page_is_handed_over(rig: Rig) -> None:
    giver, taker = rig.open(granted=[PageRun(3, 5)]), rig.open()
    here, there = giver.reserve(4 * PAGE), taker.reserve(4 * PAGE)
    here.map(1, [PageRun(3, 5)])
    ctypes.memset(here.base + PAGE, 0xAB, 2 * PAGE)
    here.unmap(1, 2)
    giver.revoke([PageRun(3, 5)])
    taker.grant([PageRun(4, 5), PageRun(3, 4)])
    there.map(0, [PageRun(4, 5)])
    assert ctypes.string_at(there.base, PAGE) == b"\xab" * PAGE


def test_moves_are_done_in_order_when_the_call_returns(rig: Rig) -> None:
    device = rig.open(granted=[PageRun(0, 3)])
    space = device.reserve(3 * PAGE)
    space.map(0, [PageRun(0, 3)])
    ctypes.memset(space.base, 4, PAGE)
    device.move([(space.base + PAGE, space.base, PAGE), (space.base + 2 * PAGE, space.base + PAGE, 100)])
    assert ctypes.string_at(space.base + PAGE, PAGE + 101) == b"\4" * (PAGE + 100) + b"\0"


def test_another_process_maps_the_same_pages_and_its_events_are_ours(rig: Rig, words: SharedWords) -> None:
    device = rig.open(granted=[PageRun(0, 2)], stream_words=[0])
    space = device.reserve(2 * PAGE)
    space.map(0, [PageRun(0, 2)])
    ctypes.memset(space.base, 7, PAGE)
    command = [sys.executable, "-c", PEER, words.path, rig.pool.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as peer:
        assert peer.stdout is not None
        assert peer.stdout.readline() == b"waiting\n"
        stream = device.stream("ours")
        assert ctypes.string_at(space.base + PAGE, 1) == b"\0"
        stream.copy([])
        stream.wait(EventHandle(1, 1))
        after = stream.copy([(space.base, space.base + PAGE, 1)])
        assert device.wait(after, timeout_ns=LONG_NS)
    assert peer.returncode == 0
    assert ctypes.string_at(space.base + PAGE, PAGE) == b"\7" * PAGE


def test_the_owner_wipes_what_a_lost_process_left(rig: Rig) -> None:
    lost = rig.open(granted=[PageRun(0, 16)])
    space = lost.reserve(16 * PAGE)
    space.map(0, [PageRun(0, 16)])
    ctypes.memset(space.base, 9, 16 * PAGE)
    space.close()
    rig.pool.wipe([PageRun(1, 3), PageRun(15, 16)])
    assert rig.pool_model.held() | {"handles": 0} == dict.fromkeys(rig.pool_model.held(), 0)
    heir = rig.open(granted=[PageRun(0, 16)])
    own = heir.reserve(16 * PAGE)
    own.map(0, [PageRun(0, 16)])
    wiped = [ctypes.string_at(own.base + page * PAGE, PAGE) == bytes(PAGE) for page in range(16)]
    assert [page for page in range(16) if wiped[page]] == [1, 2, 15]


@pytest.mark.parametrize(
    ("refused", "after"),
    [("cuStreamCreate", 0), ("cuMemAddressReserve", 0), ("cuMemMap", 2), ("cuMemSetAccess", 0), ("cuMemsetD8Async", 0)],
)
def test_an_owner_that_cannot_wipe_keeps_nothing_for_it(rig: Rig, refused: str, after: int) -> None:
    """Its context alone takes hundreds of MiB of the GPU."""
    before = rig.pool_model.held()
    rig.pool_model.fail(refused, after=after)
    with pytest.raises(CudaError, match=f"{refused}: CUDA_ERROR_OUT_OF_MEMORY"):
        rig.pool.wipe([PageRun(0, 3)])
    assert rig.pool_model.held() == before
    rig.pool.wipe([PageRun(0, 3)])


def test_a_pool_whose_owner_is_gone_gives_no_pages(rig: Rig) -> None:
    device = rig.open()
    rig.close_pool()
    space = device.reserve(PAGE)
    device.grant([PageRun(0, 1)])
    with pytest.raises(OSError, match="gave 0 of 1 handles"):
        space.map(0, [PageRun(0, 1)])


def test_pages_that_cannot_all_be_exported_leave_no_descriptor(rig: Rig) -> None:
    held()
    files = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    device = rig.open()
    rig.pool_model.fail("cuMemExportToShareableHandle", after=3)
    space = device.reserve(5 * PAGE)
    device.grant([PageRun(0, 5)])
    with pytest.raises(OSError, match="gave 0 of 5 handles"):
        space.map(0, [PageRun(0, 5)])
    device.close()
    rig.devices.clear()
    assert held()[0] == files


def test_a_process_that_comes_when_the_owner_has_no_descriptors_is_served_later(
    words: SharedWords, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would wait for ever, and every one after it."""
    accept, refusals = socket.socket.accept, [OSError(errno.EMFILE, "Too many open files")]

    def lacking(listener: socket.socket) -> tuple[socket.socket, object]:
        if refusals:
            raise refusals.pop()
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", lacking)
    rig = Rig(words)
    greeting = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    greeting.settimeout(10)
    greeting.connect(f"\0{rig.pool.address}")
    assert greeting.recv(100)
    greeting.close()
    rig.close()


def test_calls_that_stop_a_device_are_counted() -> None:
    class Api(DriverModel):
        def cuCtxSynchronize(self) -> tuple[int]:
            return (0,)

    driver = Driver(Api())
    driver("cuCtxSynchronize")
    driver("cuInit", 0)
    assert driver.device_wide == 1


def test_closed_regions_are_forgotten_and_open_ones_closed(rig: Rig, tmp_path: Path) -> None:
    path = tmp_path / "image"
    path.write_bytes(b"x")
    device = rig.open()
    for _ in range(5):
        device.open_host(str(path), writable=False).close()
    last = device.open_host(str(path), writable=False)
    assert device._regions == {last}
    assert last.pinned


def test_a_region_that_cannot_be_page_locked_is_used_as_it_is(rig: Rig, tmp_path: Path) -> None:
    path = tmp_path / "image"
    path.write_bytes(b"bytes")
    device = rig.open()
    rig.models[0].failing["cuMemHostRegister"] = 2
    region = device.open_host(str(path), writable=False)
    assert not region.pinned
    assert ctypes.string_at(region.base, 5) == b"bytes"


def test_where_memory_for_reading_cannot_be_page_locked_it_is_mapped_for_writing(rig: Rig) -> None:
    memory = SharedMemory.create(1 << 20, "image")
    device = rig.open()
    rig.models[0].failing["cuMemHostRegister"] = 1
    region = device.open_host(memory.path, writable=False)
    assert region.pinned
    ctypes.memset(region.base, 1, 1)
    memory.close()


def test_a_region_can_be_opened_from_any_thread(rig: Rig, tmp_path: Path) -> None:
    path = tmp_path / "image"
    path.write_bytes(b"bytes")
    device = rig.open()
    opened = []
    thread = threading.Thread(target=lambda: opened.append(device.open_host(str(path), writable=False)))
    thread.start()
    thread.join()
    assert opened[0].pinned


def test_the_model_of_the_driver_has_the_real_ones_names_and_values() -> None:
    """What stands in for the bindings must not invent anything."""
    real = pytest.importorskip("cuda.bindings.driver")
    for name, value in vars(DriverModel).items():
        if name.startswith("cu"):
            assert callable(getattr(real, name))
        elif name.startswith("CU_"):
            assert getattr(real, name) == value
        elif isinstance(value, type) and hasattr(value, "__members__"):
            theirs = getattr(real, name)
            assert [each.value for each in value] == [getattr(theirs, each.name) for each in value]
    for name in ("CUmemAllocationProp", "CUmemAccessDesc"):
        assert all(hasattr(getattr(real, name)(), attribute) for attribute in vars(getattr(DriverModel, name)()))


def test_no_call_of_ours_waits_for_a_device() -> None:
    used = "".join(file.read_text() for file in Path("aegis/device/cuda").glob("*.py") if file.name != "driver.py")
    assert '"cuMemcpyAsync"' in used
    assert [name for name in DEVICE_WIDE if f'"{name}"' in used] == []


def test_what_the_driver_refuses_is_an_error_of_the_system() -> None:
    with pytest.raises(OSError, match="cuMemRelease: CUDA_ERROR_NOT_INITIALIZED"):
        Driver(DriverModel())("cuMemRelease", None)
    assert issubclass(CudaError, OSError)
