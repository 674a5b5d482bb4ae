"""Pages of another GPU, mapped here: over a model of the driver, and loads that go over both links."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest

from aegis.core.ids import PageRun
from aegis.core.model import PIECE_BYTES, STAGING_BYTES
from aegis.device.cuda.device import CudaDevice
from aegis.device.cuda.driver import Driver
from aegis.device.cuda.pool import CudaPool
from aegis.device.peer_transfers import PEER_STREAMS, PEER_WORDS, PeerTransfers
from aegis.device.shared_events import SharedWords
from tests.unit.device.cuda_driver_model import DriverModel
from tests.unit.device.cuda_parts import LONG_NS, PAGE

WORDS = PEER_STREAMS + PEER_WORDS
STAGING = (PageRun(0, 5), PageRun(7, 14))
PIECES = 6
NBYTES = PIECES * PIECE_BYTES - 777
PAGES = -(-NBYTES // PAGE)


def two_gpus(uses: int) -> DriverModel:
    model = DriverModel()
    model.gpus, model.uses = 2, uses
    return model


class Stand:
    """GPU 0, which loads, and GPU 1: a process that has the memory of each, and one that uses it."""

    def __init__(self) -> None:
        self.words = SharedWords.create(3 * WORDS)
        self.models = [two_gpus(uses) for uses in (0, 1, 0, 1)]
        self.pools = [
            CudaPool(PAGES * PAGE, driver=Driver(self.models[0])),
            CudaPool(14 * PAGE, ordinal=1, driver=Driver(self.models[1])),
        ]
        self.target = self._open(self.pools[0], self.models[2], WORDS, PAGES)
        self.other = self._open(self.pools[1], self.models[3], 2 * WORDS, 14)

    def _open(self, pool: CudaPool, model: DriverModel, word: int, pages: int) -> CudaDevice:
        device = CudaDevice(
            pool.address, self.words, stream_words=range(word, word + PEER_STREAMS), driver=Driver(model)
        )
        device.grant([PageRun(0, pages)])
        return device

    def transfers(self, device: CudaDevice, word: int) -> PeerTransfers:
        return PeerTransfers(device, self.words, range(word + PEER_STREAMS, word + WORDS))

    def close(self) -> None:
        for device in (self.target, self.other):
            device.close()
        for pool in self.pools:
            pool.close()
        self.words.close()


@pytest.fixture
def stand() -> Iterator[Stand]:
    stand = Stand()
    yield stand
    stand.close()


def test_what_the_other_gpu_wrote_is_copied_over_the_peer_link(stand: Stand) -> None:
    there = stand.other.reserve(2 * PAGE)
    there.map(0, [PageRun(9, 10), PageRun(3, 4)])
    ctypes.memset(there.base, 0xA1, PAGE)
    ctypes.memset(there.base + PAGE, 0xB2, PAGE)
    memory = stand.target.open_peer(stand.pools[1].address, (PageRun(9, 10), PageRun(3, 4)))
    assert memory is not None and memory.nbytes == 2 * PAGE
    here = stand.target.reserve(2 * PAGE)
    here.map(0, [PageRun(0, 2)])
    event = stand.target.stream("pull", between=True).copy([(here.base, memory.base, 2 * PAGE)])
    assert stand.target.wait(event, timeout_ns=LONG_NS)
    assert ctypes.string_at(here.base, 2 * PAGE) == b"\xa1" * PAGE + b"\xb2" * PAGE
    assert stand.models[2].calls["cuDeviceCanAccessPeer"] == 1
    memory.close()
    memory.close()


def test_closing_gives_everything_back(stand: Stand) -> None:
    stand.target.reserve(PAGES * PAGE).map(0, [PageRun(0, PAGES)])  # waits for its own pages, which come meanwhile
    before = stand.models[2].held()
    memory = stand.target.open_peer(stand.pools[1].address, STAGING)
    assert memory is not None and stand.models[2].held() != before
    memory.close()
    assert stand.models[2].held() == before


def test_a_gpu_without_a_link_is_not_opened(stand: Stand) -> None:
    stand.models[2].unreachable.add(1)
    stand.target.reserve(PAGES * PAGE).map(0, [PageRun(0, PAGES)])  # waits for its own pages
    before = stand.models[2].held()
    assert stand.target.open_peer(stand.pools[1].address, STAGING) is None
    assert stand.models[2].held() == before


def test_a_gpu_that_this_process_does_not_see_is_not_opened(stand: Stand) -> None:
    stand.models[2].gpus = 1
    assert stand.target.open_peer(stand.pools[1].address, STAGING) is None


def test_a_pool_that_is_gone_is_not_opened(stand: Stand) -> None:
    assert stand.target.open_peer("nobody", STAGING) is None


@pytest.mark.parametrize(
    ("refused", "after"),
    [
        ("cuMemImportFromShareableHandle", 0),
        ("cuMemImportFromShareableHandle", 3),
        ("cuMemMap", 3),
        ("cuMemSetAccess", 0),
    ],
)
def test_what_the_driver_refuses_leaves_nothing_behind(stand: Stand, refused: str, after: int) -> None:
    stand.target.reserve(PAGES * PAGE).map(0, [PageRun(0, PAGES)])  # waits for its own pages
    before = stand.models[2].held()
    stand.models[2].fail(refused, after=after)
    assert stand.target.open_peer(stand.pools[1].address, STAGING) is None
    assert stand.models[2].held() == before


def test_an_image_comes_over_both_links(stand: Stand) -> None:
    """The second hop of each piece waits for the event of the first, which the other GPU writes."""
    content = ctypes.create_string_buffer(bytes(range(251)) * (NBYTES // 251 + 1), NBYTES + 251)
    image = [(0, ctypes.addressof(content), NBYTES)]
    target, other = stand.transfers(stand.target, WORDS), stand.transfers(stand.other, 2 * WORDS)
    space = stand.target.reserve(PAGES * PAGE)
    space.map(0, [PageRun(0, PAGES)])
    target.loads._own._handle.put(lambda: stand.words.wait(0, 1, timeout_ns=LONG_NS) and None)
    event = target.loads.load(1, image, space.base)
    staged = other.relay.stage(1, 1, image, target.words.requests[0], STAGING)
    target.loads.join(1, 0, stand.pools[1].address, STAGING, other.words.staged)
    assert stand.target.wait(staged, timeout_ns=LONG_NS)
    assert target.loads.carried_bytes > STAGING_BYTES - PIECE_BYTES
    assert not stand.target.passed(event)
    stand.words.store(0, 1)
    assert stand.target.wait(event, timeout_ns=LONG_NS)
    assert ctypes.string_at(space.base, NBYTES) == content.raw[:NBYTES]
    assert stand.target.device_wide == stand.other.device_wide == 0
    for transfers in (target, other):
        transfers.close()
