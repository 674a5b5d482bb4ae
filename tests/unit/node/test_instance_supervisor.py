"""An instance counts from the moment at which it is asked for: it may be ready before its start is answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, cast

import pytest

from aegis.control.settings import BusSettings
from aegis.core.estimators import Hardware
from aegis.core.ids import InstanceId, MachineId
from aegis.core.role import Role
from aegis.instance.settings import InstanceSettings
from aegis.node.instance_supervisor import InstanceSupervisor
from aegis.node.machine import InstanceHost, RankMemory

MIXED = InstanceId("mixed-0")
FIRST = "mixed-0/1"


class Process:
    """Runs until it is killed."""

    pid = 7

    def __init__(self) -> None:
        self._ended = asyncio.Event()
        self._code = 0

    def end(self, code: int = 0) -> None:
        self._code = code
        self._ended.set()

    def kill(self) -> None:
        self.end(-9)

    async def wait(self) -> int:
        await self._ended.wait()
        return self._code


class Machine:
    """Answers a start when it is told to; it is its own place of every instance."""

    id = MachineId("")
    clock_ahead_ns = 0
    rendezvous = ""
    memory = (RankMemory("", "", ""),)

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.broken_off = False
        self.answer: asyncio.Future[Process] = asyncio.get_running_loop().create_future()

    def poison(self, words: Sequence[int]) -> None: ...

    async def start(self, ranks: Sequence[InstanceSettings]) -> Process:
        self.asked.set()
        try:
            return await asyncio.shield(self.answer)
        except asyncio.CancelledError:
            self.broken_off = True
            raise

    async def host(self, instance: InstanceId) -> InstanceHost:
        return InstanceHost(cast(Any, self), ("",), (0,))

    async def leave(self, instance: InstanceId) -> None: ...


class Link:
    def send(self, identity: str, messages: Sequence[object]) -> None: ...


TEMPLATE = InstanceSettings(
    policy="least-slack",
    memory_bytes=0,
    max_group_size=8,
    q_max_ns=0,
    switching_share=0.0,
    hardware=Hardware(),
    instance=InstanceId(""),
    incarnation=0,
    role=Role.MIXED,
    address="",
    words_path="",
    words=(),
    host_kv_path="",
    images_path="",
    device="cpu",
    device_address="",
    slab_bytes=0,
    host_slabs=0,
    instances=1,
    bus=BusSettings(address="", cluster="", prefix=""),
)


class Stand:
    def __init__(self, instances: Sequence[InstanceId] = (MIXED,)) -> None:
        self.machine = Machine()
        self.lost: list[tuple[InstanceId, int]] = []
        roles, machines, link = dict.fromkeys(instances, Role.MIXED), cast(Any, self.machine), cast(Any, Link())
        self.pool = InstanceSupervisor(TEMPLATE, roles, machines, link, self._note_lost, lambda _: None)
        self.pool.start()

    async def _note_lost(self, instance: InstanceId, incarnation: int) -> None:
        self.lost.append((instance, incarnation))


def standing(work: Callable[[Stand], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        stand = Stand()
        await stand.machine.asked.wait()
        await work(stand)
        await stand.pool.close()

    asyncio.run(main())


def test_an_instance_that_is_ready_before_its_start_is_answered_serves() -> None:
    async def work(stand: Stand) -> None:
        assert stand.pool.sender(FIRST) == MIXED
        stand.pool.became_ready(MIXED)
        stand.machine.answer.set_result(Process())
        await asyncio.sleep(0)
        assert not stand.pool.missing()
        assert not stand.lost

    standing(work)


def test_an_instance_that_was_ready_and_whose_start_fails_is_lost() -> None:
    async def work(stand: Stand) -> None:
        stand.pool.became_ready(MIXED)
        stand.machine.answer.set_exception(ConnectionResetError(104, "reset"))
        while not stand.lost:
            await asyncio.sleep(0)
        assert stand.lost == [(MIXED, 1)]
        assert stand.pool.missing() == [MIXED]
        assert stand.pool.sender(FIRST) is None

    standing(work)


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (OSError(11, "Resource temporarily unavailable"), "Resource temporarily unavailable"),
        (ConnectionResetError("Connection lost"), "Connection lost"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_an_instance_that_cannot_be_started_says_why(
    error: OSError, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(stand: Stand) -> None:
        stand.machine.answer.set_exception(error)
        while not caplog.messages:
            await asyncio.sleep(0)
        assert caplog.messages == [f"mixed-0 cannot be started: {why}"]

    standing(work)


def test_an_instance_that_is_drained_while_it_starts_has_a_process() -> None:
    async def work(stand: Stand) -> None:
        stand.pool.drain(MIXED)
        assert not stand.pool.drained(MIXED)
        process = Process()
        process.kill()
        stand.machine.answer.set_result(process)
        while not stand.pool.drained(MIXED):
            await asyncio.sleep(0)

    standing(work)


@pytest.mark.parametrize("returns", [False, True])
def test_a_drained_instance_is_no_hope_unless_it_returns(returns: bool) -> None:
    async def main() -> None:
        other = InstanceId("mixed-1")
        stand = Stand([MIXED, other])
        stand.pool.drain(other, returns=returns)
        assert not stand.pool.hopeless()
        place = stand.pool._places[MIXED]
        while not place.restarts.given_up:
            place.restarts.failed()
        assert stand.pool.hopeless() is not returns
        stand.pool.resume(other, Role.MIXED)
        assert not stand.pool.hopeless() and stand.pool.staying() == {other: Role.MIXED}
        await stand.pool.close()

    asyncio.run(main())


@pytest.mark.parametrize("ready", [False, True])
@pytest.mark.parametrize("removed", [False, True])
def test_a_start_that_is_not_answered_keeps_nobody_from_ending(removed: bool, ready: bool) -> None:
    async def work(stand: Stand) -> None:
        if ready:
            stand.pool.became_ready(MIXED)
        async with asyncio.timeout(4):  # close() kills what has not ended after five
            await (stand.pool.remove(MIXED) if removed else stand.pool.close())
        assert stand.machine.broken_off
        assert stand.lost == [(MIXED, 1)] * (removed and ready)

    standing(work)


@pytest.mark.parametrize(
    ("drained", "code", "level"), [(True, 0, "INFO"), (True, -9, "WARNING"), (False, 0, "WARNING")]
)
def test_a_drained_process_that_ends_in_order_is_nothing_to_warn_of(
    drained: bool, code: int, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(stand: Stand) -> None:
        process = Process()
        stand.machine.answer.set_result(process)
        stand.pool.became_ready(MIXED)
        if drained:
            stand.pool.drain(MIXED)
        process.end(code)
        while not stand.lost:
            await asyncio.sleep(0)

    with caplog.at_level("INFO"):
        standing(work)
    assert [each.levelname for each in caplog.records if f"ended with code {code}" in each.message] == [level]
