"""Devices that are taken in groups: one account, the same pages of each."""

from __future__ import annotations

from aegis.core.ids import InstanceId
from aegis.runtime.clock import MonotonicClock
from aegis.runtime.devices import Devices
from tests.parity.stand_ins import CountedPool

A, B = InstanceId("decode-0"), InstanceId("decode-1")


def test_ranks_have_a_device_each_and_what_the_smallest_has() -> None:
    pools = [CountedPool(pages, 2 << 20, address) for pages, address in ((8, "a"), (6, "b"), (9, "c"), (7, "d"))]
    devices = Devices(pools, {A: 0, B: 1}, MonotonicClock(), floor_bytes=0, idle_s=1, ranks=2)
    assert devices.addresses(A) == ["a", "b"]
    assert devices.addresses(B) == ["c", "d"]
    assert devices.page_count == 6
    assert len(devices.arbiters()) == 2
