"""Machines as the launcher sees them: what fails on one costs that machine and no other, and leaves no actor behind."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from aegis import __version__
from aegis.cluster import remote_machine
from aegis.cluster.actor_messages import Opened, Opening
from aegis.cluster.instance_hosts import ClusterHosts
from aegis.cluster.machine_actor import MachineActor
from aegis.cluster.remote_machine import RemoteMachine, RemotePool, RemoteProcesses
from aegis.config.config import Config
from aegis.core.errors import UserError
from aegis.core.ids import InstanceId, MachineId
from aegis.core.model import ModelSpec
from aegis.node.devices import Devices
from aegis.node.image_caches import ImageCaches
from aegis.process.clock import MonotonicClock
from aegis.sim.faults.fake_models import PAGE, make_spec
from memory.machines_kv import MachinesKv

ray = pytest.importorskip("ray", reason="no Ray; pip install -e '.[ray]'")

LIMIT_S, WAIT_S = 0.05, 30.0
NODE, INSTANCE = "a-node", InstanceId("mixed-0")


class Actor:
    """One of Ray's: a call is answered with what the method returns or raises, or, where it has none such, never."""

    def __init__(self, **methods: Callable[..., Any]) -> None:
        self.methods = methods
        self.unanswered: dict[str, Future[Any]] = {}

    def __getattr__(self, name: str) -> Method:
        return Method(self, name)


class Method:
    def __init__(self, actor: Actor, name: str) -> None:
        self._actor = actor
        self._name = name

    def remote(self, *arguments: Any) -> Reference:
        answer: Future[Any] = Future()
        if method := self._actor.methods.get(self._name):
            try:
                answer.set_result(method(*arguments))
            except Exception as error:  # noqa: BLE001 - it is the caller's
                answer.set_exception(error)
        else:
            self._actor.unanswered[self._name] = answer
        return Reference(answer)


class Reference:
    def __init__(self, answer: Future[Any]) -> None:
        self._answer = answer

    def future(self) -> Future[Any]:
        return self._answer


@pytest.fixture(autouse=True)
def ended(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Actors that Ray was told to end."""
    found: list[object] = []
    monkeypatch.setattr(ray, "kill", found.append)
    monkeypatch.setattr(remote_machine, "_KILLED_WITHIN_S", LIMIT_S)
    monkeypatch.setattr(remote_machine, "_BUSY_S", WAIT_S)
    return found


def nothing(*_arguments: object) -> None:
    pass


# --- a process that is to be killed -----------------------------------------------------------------------------------


def kill(actor: Actor, transfer_actor: Actor, then: Callable[[], None] = nothing) -> bool:
    """Whether its machine is there afterwards; `then` happens when the first limit is over."""

    async def main() -> bool:
        machine = RemoteMachine(MachineId("machine-0"), NODE, actor, transfer_actor)
        processes = RemoteProcesses(machine, 0, 1)
        processes.kill()
        (killing,) = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.wait({killing}, timeout=2 * LIMIT_S)
        then()
        async with asyncio.timeout(WAIT_S):
            await killing
        return not machine.lost

    return asyncio.run(main())


def test_a_machine_that_has_killed_it_stays() -> None:
    assert kill(Actor(kill=nothing), Actor())


def test_a_busy_machine_gets_longer_while_its_node_answers(ended: list[object]) -> None:
    actor, transfer_actor = Actor(), Actor(__ray_ready__=nothing)
    assert kill(actor, transfer_actor, lambda: actor.unanswered["kill"].set_result(None))
    assert not ended


@pytest.mark.parametrize("transfer_actor", [Actor(), Actor(__ray_ready__=nothing)], ids=["gone", "busy for ever"])
def test_a_machine_that_does_not_answer_is_lost(
    transfer_actor: Actor, ended: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_machine, "_BUSY_S", LIMIT_S)
    actor = Actor()
    assert not kill(actor, transfer_actor)
    assert ended == [actor, transfer_actor]


# --- opening and closing them -----------------------------------------------------------------------------------------


def test_a_process_whose_start_nobody_waited_for_is_killed_once_it_is_there() -> None:
    killed: list[int] = []
    actor = Actor(kill=killed.append)

    async def main() -> None:
        machine = RemoteMachine(MachineId("machine-0"), NODE, actor, Actor())
        starting = asyncio.create_task(machine.start(()))
        while "start" not in actor.unanswered:
            await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert not killed
        actor.unanswered["start"].set_result(7)
        async with asyncio.timeout(WAIT_S):
            while killed != [0]:
                await asyncio.sleep(0)

    asyncio.run(main())


class Placed:
    """As Ray has placed all."""

    async def node(self, _instance: InstanceId) -> tuple[str, list[str]]:
        return NODE, []


def opened(version: str = __version__) -> Callable[[bytes], bytes]:
    return lambda _order: msgspec.msgpack.encode(Opened(version))


def refuse(error: Exception) -> Callable[..., None]:
    def method(*_arguments: object) -> None:
        raise error

    return method


def instance_hosts(actors: Iterator[Actor], specs: tuple[ModelSpec, ...] = ()) -> ClusterHosts:
    images = ImageCaches()
    for spec in specs:
        images.add(spec, pinned=False)
    devices = Devices((), {}, MonotonicClock(), floor_bytes=0, idle_s=1.0)
    opening = Opening("", __version__, host_kv_bytes=0, cache_bytes=0, ranks=1, instances=1)

    def start(machine: MachineId, node: str) -> RemoteMachine:
        return RemoteMachine(machine, node, next(actors), Actor())

    return ClusterHosts(Config(), Placed(), opening, devices, images, MachinesKv(1 << 20), start)  # type: ignore[arg-type]


NOT_IMPORTED = """The actor with name MachineActor failed to import on the worker. This may be because needed library \
dependencies are not installed in the worker environment:

Traceback (most recent call last):
ModuleNotFoundError: No module named 'aegis'
"""

WRONG = [
    (Actor(open=opened("0.0.1")), "aegis 0.0.1"),
    (
        Actor(open=refuse(RuntimeError(NOT_IMPORTED))),
        "cannot run aegis: ModuleNotFoundError: No module named 'aegis'; ",
    ),
    (Actor(open=refuse(OSError(28, "No space left on device"))), "No space left on device"),
    (Actor(open=opened(), clock=lambda: 0, has_image=refuse(OSError(30, "Read-only file system"))), "Read-only"),
    (Actor(open=opened(), clock=lambda: 0, has_image=refuse(ValueError("damaged on its way"))), "damaged on its way"),
]


@pytest.mark.parametrize(("actor", "told"), WRONG, ids=["version", "not there", "memory", "disk", "damage"])
def test_a_machine_that_cannot_be_used_leaves_no_actor(
    actor: Actor, told: str, ended: list[object], tmp_path: Path
) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    made = make_spec(0, image_pages=1, block_bytes=PAGE)
    spec = replace(made, directory=str(tmp_path), image_path=str(tmp_path / "image"))
    with pytest.raises(UserError, match=told) as raised:
        asyncio.run(instance_hosts(iter([actor]), (spec,)).settle(INSTANCE))
    assert "\n" not in raised.value.message
    assert ended[0] is actor and len(ended) == 2


def test_who_does_not_wait_for_a_machine_leaves_no_actor(ended: list[object]) -> None:
    async def main() -> None:
        actor = Actor()
        settling = asyncio.create_task(instance_hosts(iter([actor])).settle(INSTANCE))
        async with asyncio.timeout(WAIT_S):
            while "open" not in actor.unanswered:
                await asyncio.sleep(0)
        settling.cancel()
        await asyncio.wait({settling})
        assert ended[:1] == [actor]

    asyncio.run(main())


def test_a_device_whose_opening_nobody_waited_for_is_not_taken_for_another() -> None:
    """Or the memory of one would be wiped for the other's."""
    there = MachineActor()

    def open_pool(*arguments: Any) -> bytes:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, there.open_pool(*arguments)).result()

    async def main() -> None:
        ended: list[int] = []
        machine = RemoteMachine(
            MachineId("machine-0"), NODE, Actor(open_pool=open_pool, end_pool=ended.append), Actor()
        )
        opening = asyncio.create_task(machine.open_pool("cpu", PAGE, ""))
        await asyncio.sleep(0)
        opening.cancel()
        await asyncio.wait({opening})
        pool = await machine.open_pool("cpu", 2 * PAGE, "")
        assert isinstance(pool, RemotePool)
        await pool.end()
        assert [there._pools[number].page_count for number in ended] == [2] and len(there._pools) == 2

    asyncio.run(main())
    for pool in there._pools:
        pool.close()


def test_an_error_that_comes_when_nobody_asks_any_more_is_no_traceback_in_the_log() -> None:
    """Of a call to an actor that is ended meanwhile."""
    found: list[dict[str, Any]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: found.append(context))
        actor = Actor()
        asking = asyncio.create_task(RemoteMachine(MachineId("machine-0"), NODE, actor, Actor()).call("open"))
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait({asking})
        actor.unanswered.pop("open").set_exception(ray.exceptions.ActorDiedError())
        await asyncio.sleep(0.01)
        gc.collect()

    asyncio.run(main())
    assert not found


@pytest.mark.parametrize(
    "close", [nothing, refuse(OSError(5, "Input/output error")), refuse(AttributeError("x")), None]
)
def test_closing_ends_its_actors_whatever_it_says(close: Callable[..., None] | None, ended: list[object]) -> None:
    actor, transfer_actor = Actor(**({"close": close} if close else {})), Actor()
    asyncio.run(RemoteMachine(MachineId("machine-0"), NODE, actor, transfer_actor).close())
    assert ended == [actor, transfer_actor]
