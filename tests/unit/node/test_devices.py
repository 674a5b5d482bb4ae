"""Devices that are taken in groups: one account, the same pages of each. Pages that cannot be wiped are not used."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from aegis.core.errors import UserError
from aegis.core.ids import InstanceId, PageRun
from aegis.core.messages import NeedPages
from aegis.node.devices import Devices
from aegis.process.clock import MonotonicClock
from memory.page_arbiter import PageArbiter
from tests.parity.stand_ins import CountedPool

A, B, C, D, E = (InstanceId(f"decode-{n}") for n in range(5))


def test_ranks_have_a_device_each_and_what_the_smallest_has() -> None:
    pools = [CountedPool(pages, 2 << 20, address) for pages, address in ((8, "a"), (6, "b"), (9, "c"), (7, "d"))]
    devices = Devices(pools, {A: 0, B: 1}, MonotonicClock(), floor_bytes=0, idle_s=1, ranks=2)
    assert devices.addresses(A) == ["a", "b"]
    assert devices.addresses(B) == ["c", "d"]
    assert devices.page_count == 6
    assert len(devices.arbiters()) == 2


def test_who_joins_is_on_the_device_of_the_fewest() -> None:
    pools = [CountedPool(8, 2 << 20, address) for address in "ab"]
    devices = Devices(pools, {A: 0, B: 1}, MonotonicClock(), floor_bytes=0, idle_s=1)
    devices.share(C)
    assert devices.addresses(C) == ["a"]
    devices.share(D)
    assert devices.addresses(D) == ["b"]
    assert not devices.vacant()
    asyncio.run(_leave(devices, A, C))
    assert devices.vacant()
    devices.share(E)
    assert devices.addresses(E) == ["a"]
    assert not devices.has(A)


async def _leave(devices: Devices, *instances: InstanceId) -> None:
    for instance in instances:
        await devices.leave(instance)


def test_a_limit_goes_with_who_had_it() -> None:
    arbiter = PageArbiter(8, idle_ns=1, patience_ns=1)
    arbiter.join(A)
    arbiter.set_limit(A, 3, command=1, patience_ns=1)
    arbiter.lost(A)
    arbiter.forget(A)
    arbiter.join(A)
    assert arbiter.use()[A].limit == 8


class Posts:
    """Implements `devices.Wire`."""

    def post(self, instance: InstanceId, message: object) -> None: ...


@pytest.mark.parametrize("error", [OSError("cuMemsetD8Async: CUDA_ERROR_UNKNOWN"), UserError("GPU 0 cannot be used")])
def test_pages_that_cannot_be_wiped_are_used_no_more(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    """It is told, and the server ends in order all the same."""

    class Broken(CountedPool):
        def wipe(self, runs: Sequence[PageRun]) -> None:
            raise error

    async def main() -> list[tuple[int, int]]:
        devices = Devices([Broken(8, 2 << 20)], {A: 0}, MonotonicClock(), floor_bytes=0, idle_s=1)
        devices.wire = Posts()
        devices.join(A)
        devices.pages_requested(A, NeedPages(3, urgent=True))
        devices.lost(A)
        await devices.close()
        devices.join(A)
        devices.pages_requested(A, NeedPages(5, urgent=True))
        return [(arbiter.held(A), arbiter.free) for arbiter in devices.arbiters()]

    assert asyncio.run(main()) == [(5, 0)]
    assert [record.message for record in caplog.records] == [
        "pages of a lost process cannot be wiped and are used no more"
    ]
    assert caplog.records[0].fields == {"pages": 3, "why": str(error)}
