"""The stage buffer with a real device and real files: bytes arrive, errors are told, nothing hangs."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest

from aegis.core.ids import PageRun
from aegis.core.model import IMAGE_PIECE_BYTES, ModelSpec
from aegis.core.request import EventHandle
from aegis.device.open_device import create_pool, open_device
from aegis.device.protocol import Device
from aegis.device.shared_events import SharedWords
from aegis.device.stage_buffer import StageBuffer
from tests import weight_images
from tests.long_forms import first_of
from tests.no_free_files import no_free_files

PIECE = IMAGE_PIECE_BYTES
WAIT_NS = 20_000_000_000
PAGES = 26


class Stand:
    """A device with all its pages mapped in a row, and a stage."""

    def __init__(self, *, chunks: int, readers: int) -> None:
        self.pool = create_pool("cpu", PAGES << 21)
        self.words = SharedWords.create(4)
        self.device: Device = open_device("cpu", self.pool.address, self.words, stream_words=[0, 1])
        self.device.grant([PageRun(0, PAGES)])
        self._range = self.device.reserve(PAGES << 21)
        self._range.map(0, [PageRun(0, PAGES)])
        self.stage = StageBuffer(self.device, self.words, 2, chunks=chunks, readers=readers)

    def at(self, page: int) -> int:
        return self._range.base + (page << 21)

    def arrives(self, event: EventHandle) -> bool:
        return self.device.wait(event, timeout_ns=WAIT_NS)

    def close(self) -> None:
        self.stage.close()
        self.device.close()
        self.pool.close()
        self.words.close()


@pytest.fixture
def stand() -> Iterator[Stand]:
    stand = Stand(chunks=2, readers=3)
    yield stand
    stand.close()


def loaded(spec: ModelSpec, address: int) -> bool:
    nbytes = spec.manifest.image_bytes
    return ctypes.string_at(address, nbytes) == weight_images.content(spec.model, nbytes)


@pytest.mark.parametrize("ring", first_of(1, [(2, 3), (1, 1), (4, 2)]), ids=str)
def test_images_of_any_size_arrive_whole(ring: tuple[int, int], tmp_path: Path) -> None:
    stand = Stand(chunks=ring[0], readers=ring[1])
    for nbytes in (256, PIECE, 5 * PIECE, 5 * PIECE + 256):
        spec = weight_images.write(tmp_path, f"{nbytes}", nbytes)
        assert stand.arrives(stand.stage.load(spec, stand.at(0)))
        assert loaded(spec, stand.at(0))
    assert stand.stage.failures() == []
    stand.close()


def test_loads_asked_for_at_once_arrive_one_after_the_other(stand: Stand, tmp_path: Path) -> None:
    specs = [weight_images.write(tmp_path, name, 3 * PIECE + 512) for name in ("one", "two", "three")]
    events = [stand.stage.load(spec, stand.at(8 * at)) for at, spec in enumerate(specs)]
    assert [event.value for event in events] == [4, 8, 12]
    assert stand.arrives(events[2])
    assert all(loaded(spec, stand.at(8 * at)) for at, spec in enumerate(specs))


def missing(spec: ModelSpec) -> None:
    Path(spec.image_path).unlink()


def truncated(spec: ModelSpec) -> None:
    with Path(spec.image_path).open("r+b") as file:
        file.truncate(2 * PIECE + 100)


def changed(spec: ModelSpec) -> None:
    weight_images.damage(spec, 3 * PIECE + 77)


def a_directory(spec: ModelSpec) -> None:
    Path(spec.image_path).unlink()
    Path(spec.image_path).mkdir()


FAULTS = {missing: "No such file", truncated: "bytes instead of", changed: "checksum", a_directory: "bytes instead of"}


@pytest.mark.parametrize("fault", first_of(2, list(FAULTS)))
def test_what_cannot_be_read_is_told_before_its_event_and_harms_no_other_load(
    fault: object, stand: Stand, tmp_path: Path
) -> None:
    bad, good = (weight_images.write(tmp_path, name, 4 * PIECE + 9) for name in ("bad", "good"))
    fault(bad)  # type: ignore[operator]
    event = stand.stage.load(bad, stand.at(0))
    later = stand.stage.load(good, stand.at(10))
    assert stand.arrives(event)
    (failed,) = stand.stage.failures()
    assert failed.model == bad.model and FAULTS[fault] in failed.reason  # type: ignore[index]
    assert "\n" not in failed.reason and str(tmp_path) not in failed.reason
    assert stand.arrives(later)
    assert loaded(good, stand.at(10)) and stand.stage.failures() == []


def test_an_image_that_cannot_be_opened_for_lack_of_files_waits_for_one(
    stand: Stand, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = weight_images.write(tmp_path, "one", 3 * PIECE)
    with no_free_files():
        event = stand.stage.load(spec, stand.at(0))
        while not caplog.messages:
            pass
    assert stand.arrives(event)
    assert loaded(spec, stand.at(0)) and stand.stage.failures() == []
    assert caplog.messages == ["one waits to be loaded: its weight image cannot be opened: Too many open files"]


def test_a_file_cut_while_it_is_read_is_told(stand: Stand, tmp_path: Path) -> None:
    spec = weight_images.write(tmp_path, "one", 6 * PIECE)
    blocker = EventHandle(3, 1)
    stand.stage._stream.wait(blocker)
    event = stand.stage.load(spec, stand.at(0))
    while stand.words.load(2) == 0:  # the first piece has been read
        pass
    truncated(spec)
    stand.words.store(3, 1)
    assert stand.arrives(event)
    assert [failed.model for failed in stand.stage.failures()] == [spec.model]


def test_a_load_that_is_read_and_not_copied_is_abandoned_too(stand: Stand, tmp_path: Path) -> None:
    spec = weight_images.write(tmp_path, "one", 2 * PIECE)
    stand.stage._stream.wait(EventHandle(3, 1))
    ctypes.memset(stand.at(0), 0, 2 * PIECE)
    event = stand.stage.load(spec, stand.at(0))
    assert stand.words.wait(2, 2, timeout_ns=WAIT_NS)  # all of it has been read
    stand.stage.abandon(spec.model)
    stand.words.store(3, 1)
    assert stand.arrives(event)
    assert ctypes.string_at(stand.at(0), 2 * PIECE) == bytes(2 * PIECE)


def test_an_abandoned_load_stops_and_the_next_one_arrives(stand: Stand, tmp_path: Path) -> None:
    dropped, wanted = (weight_images.write(tmp_path, name, 5 * PIECE) for name in ("dropped", "wanted"))
    stand.stage._stream.wait(EventHandle(3, 1))
    ctypes.memset(stand.at(0), 0, 5 * PIECE)
    event = stand.stage.load(dropped, stand.at(0))
    later = stand.stage.load(wanted, stand.at(12))
    stand.stage.abandon(dropped.model)
    stand.words.store(3, 1)
    assert stand.arrives(event)
    assert ctypes.string_at(stand.at(0), 5 * PIECE) == bytes(5 * PIECE), "nothing more was copied"
    assert stand.arrives(later)
    assert loaded(wanted, stand.at(12)) and stand.stage.failures() == []
    stand.stage.abandon(wanted.model)
    assert stand.arrives(stand.stage.load(dropped, stand.at(0)))
    assert loaded(dropped, stand.at(0))


def test_closing_in_the_middle_of_a_load_ends_at_once(tmp_path: Path) -> None:
    stand = Stand(chunks=2, readers=2)
    stand.stage._stream.wait(EventHandle(3, 1))
    stand.stage.load(weight_images.write(tmp_path, "one", 9 * PIECE), stand.at(0))
    stand.close()
