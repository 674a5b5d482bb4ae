"""The CUDA device passes the tests of the CPU device, over a model of the driver: its streams, a stage, an executor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from aegis.core.ids import PageRun
from aegis.device.cuda.device import CudaDevice
from aegis.device.cuda.driver import Driver
from aegis.device.cuda.pool import CudaPool
from aegis.device.shared_events import SharedWords
from tests.unit.device import test_memory_executor, test_stage_buffer
from tests.unit.device.cpu.test_streams import (  # noqa: F401
    test_a_used_word_cannot_be_a_streams,
    test_a_wipe_waits_its_turn_and_keeps_its_pages_until_then,
    test_an_abandoned_copy_is_not_done_and_its_event_passes,
    test_copies_of_all_sizes_are_exact,
    test_every_stream_has_a_word_of_its_own,
    test_nothing_after_a_wait_starts_before_the_event,
    test_values_count_the_copies_from_one,
    test_wiped_pages_are_zeros_and_no_other_is_touched,
)
from tests.unit.device.cuda_driver_model import DriverModel
from tests.unit.device.test_memory_executor import (  # noqa: F401
    test_a_cached_image_is_put_together_from_its_extents_and_its_file_is_left_alone,
    test_a_load_given_up_leaves_its_target_alone_and_its_event_passes,
    test_a_load_that_failed_is_told_before_it_counts_as_done,
    test_loads_from_cache_and_disk_take_turns_on_the_weights_stream,
    test_what_a_process_finds_in_the_cache_changes_with_what_is_filled_in_later,
)
from tests.unit.device.test_stage_buffer import (  # noqa: F401
    test_a_load_that_is_read_and_not_copied_is_abandoned_too,
    test_an_abandoned_load_stops_and_the_next_one_arrives,
    test_closing_in_the_middle_of_a_load_ends_at_once,
    test_images_of_any_size_arrive_whole,
    test_loads_asked_for_at_once_arrive_one_after_the_other,
    test_what_cannot_be_read_is_told_before_its_event_and_harms_no_other_load,
)


def make_pool(_kind: str, nbytes: int) -> CudaPool:
    return CudaPool(nbytes, driver=Driver(DriverModel()))


def make_device(address: str, words: SharedWords, *, stream_words: Sequence[int] | None = None) -> CudaDevice:
    return CudaDevice(address, words, stream_words=stream_words, driver=Driver(DriverModel()))


@pytest.fixture
def pool() -> Iterator[CudaPool]:
    pool = make_pool("cuda", 32 << 20)
    yield pool
    pool.close()


@pytest.fixture
def device(pool: CudaPool, words: SharedWords) -> Iterator[CudaDevice]:
    device = make_device(pool.address, words)
    device.grant([PageRun(0, device.page_count)])
    yield device
    device.close()


@pytest.fixture(autouse=True)
def everything_is_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_memory_executor, "CpuDevice", make_device)
    monkeypatch.setattr(test_stage_buffer, "create_pool", make_pool)
    monkeypatch.setattr(test_stage_buffer, "open_device", lambda _kind, *rest, **options: make_device(*rest, **options))


@pytest.fixture
def stage_stand() -> Iterator[test_stage_buffer.Stand]:
    stand = test_stage_buffer.Stand(chunks=2, readers=3)
    yield stand
    stand.close()


@pytest.fixture
def mover_stand(pool: CudaPool, words: SharedWords) -> Iterator[test_memory_executor.Stand]:
    stand = test_memory_executor.Stand(pool, words)  # type: ignore[arg-type]
    yield stand
    stand.stage.close()
    stand.images.close()
    stand.device.close()
    stand.cache.close()
    stand.kv.close()


@pytest.fixture
def stand(request: pytest.FixtureRequest) -> object:
    of_stage = request.function.__module__ == test_stage_buffer.__name__
    return request.getfixturevalue("stage_stand" if of_stage else "mover_stand")
