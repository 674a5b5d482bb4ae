"""Lanes of the CPU device: who computes where, and how many threads there are."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from aegis.device.cpu.device import CpuDevice
from aegis.device.cpu.lanes import CpuLane, DividedCores, timed_lanes
from aegis.device.cpu.pool import CpuPool
from aegis.device.divisions import WHOLE
from aegis.device.protocol import Device
from aegis.device.shared_events import SharedWords

CORES = frozenset(os.sched_getaffinity(0))

several_cores = pytest.mark.skipif(len(CORES) < 2, reason="this machine has one core")


@pytest.fixture
def device(words: SharedWords) -> Iterator[CpuDevice]:
    pool = CpuPool(8 << 20)
    device = CpuDevice(pool.address, words, threads=len(CORES))
    yield device
    device.close()
    pool.close()


@several_cores
def test_lanes_share_all_cores_out(device: Device) -> None:
    whole, *divisions = device.partitions()
    assert whole == WHOLE
    assert len(divisions) >= 1
    for shares in divisions:
        lanes = device.lanes(shares)
        assert tuple(lane.share for lane in lanes) == shares
        assert sum(lane.threads for lane in lanes) == len(CORES)
        assert {lane.stream for lane in lanes} == {0}


@several_cores
def test_a_thread_and_those_it_starts_compute_on_the_cores_of_its_lane_and_no_other_thread_does(device: Device) -> None:
    where = dict[int, tuple[frozenset[int], frozenset[int]]]()

    def enter(number: int) -> None:
        lanes[number].enter()
        own = frozenset(os.sched_getaffinity(0))
        started = list[frozenset[int]]()
        thread = threading.Thread(target=lambda: started.append(frozenset(os.sched_getaffinity(0))))
        thread.start()
        thread.join()
        where[number] = own, started[0]

    lanes = device.lanes(device.partitions()[1])
    threads = [threading.Thread(target=enter, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
        thread.join()
    for number, lane in enumerate(lanes):
        assert len(where[number][0]) == lane.threads
        assert where[number][0] == where[number][1]
    assert not where[0][0] & where[1][0]
    assert where[0][0] | where[1][0] == CORES
    assert frozenset(os.sched_getaffinity(0)) == CORES


def test_an_instance_that_computes_with_one_thread_offers_the_time_of_its_cores(words: SharedWords) -> None:
    pool = CpuPool(8 << 20)
    device = CpuDevice(pool.address, words, threads=1)
    whole, *divisions = device.partitions()
    assert whole == WHOLE and device.lanes_are_timed
    assert divisions == sorted(divisions) and divisions[-1] == (500, 500)
    for shares in divisions:
        assert sum(shares) == 1000
        assert [(lane.share, lane.threads, lane.cores) for lane in device.lanes(shares)] == [
            (share, 1, CORES) for share in shares
        ]
    with pytest.raises(KeyError):
        device.lanes((400, 600))
    device.close()
    pool.close()


def test_lanes_on_the_same_cores_have_the_weights_of_their_shares() -> None:
    shares, (first, second) = next(iter(timed_lanes().items()))
    assert shares == (97, 903)
    assert 1.25 ** (first - second) == pytest.approx(shares[1] / shares[0], rel=0.01)
    nice = dict[str, int]()

    def enter(name: str, lane: CpuLane) -> None:
        lane.enter()
        nice[name] = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    for name, lane in zip(("first", "second"), DividedCores(1).lanes(shares), strict=True):
        thread = threading.Thread(target=enter, args=(name, lane))
        thread.start()
        thread.join()
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert nice == {"first": min(own + first, 19), "second": own}


@pytest.mark.skipif(len(CORES) < 3, reason="needs a core that is left to others")
def test_where_others_compute_too_no_lane_keeps_a_core_to_itself() -> None:
    lanes = DividedCores(2).lanes((500, 500))
    assert [lane.cores for lane in lanes] == [CORES, CORES]
    assert [lane.threads for lane in lanes] == [1, 1]
