"""A machine of the cluster as the launcher sees it: what is asked of it goes to its actor.

It is lost when Ray says that its actor is, or when it does not answer in time where it has to. Then it stays lost, for
its memory may be: whatever comes back on that node is another machine.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any

import msgspec

from aegis.cluster.actor_messages import Opened, PoolOpened
from aegis.core.ids import MachineId, ModelId, PageRun
from aegis.core.model import ModelSpec
from aegis.core.request import EventHandle
from aegis.instance.settings import InstanceSettings
from aegis.node.image_filler import Filled
from aegis.node.machine import EventWords
from aegis.process.error_lines import flattened
from aegis.telemetry.logs import log
from memory.pages import Runs

_KILLED_WITHIN_S = 1.0
_BUSY_S = 5.0
_CLOCKS_COMPARED = 8
_LOST_CODE = -9
_logger = logging.getLogger(__name__)


class MachineLost(Exception):
    """The machine is lost: what it was asked to do is not done, now or ever."""


class RemoteMachine:
    """Implements `aegis.node.machine.Machine`."""

    def __init__(self, machine: MachineId, node: str, actor: Any, transfer_actor: Any) -> None:
        """On that node of the cluster; `opened` is what its actor said, the `transfer_actor` brings what others
        have."""
        self.id = machine
        self.node = node
        self.transfer_actor = transfer_actor
        self._actor = actor
        self.opened = Opened("")
        self.clock_ahead_ns = 0
        self.words = EventWords()
        self.shipped: set[tuple[ModelId, str]] = set()  # models whose images it has, with their fingerprints
        self.shipping: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # for each directory of images
        self.filler = RemoteFiller(self)
        self.reached: set[MachineId] = set()  # machines whose host KV its transfer actor can read
        self.reaching = asyncio.Lock()
        self._lost = asyncio.Event()
        self._keys = count()
        self._background: set[asyncio.Task[None]] = set()

    @property
    def memory(self) -> Sequence[Any]:
        return self.opened.memory

    @property
    def rendezvous(self) -> str:
        return self.opened.rendezvous

    @property
    def lost(self) -> bool:
        return self._lost.is_set()

    def lose(self, why: str) -> None:
        """Nothing is expected of it any more."""
        if not self.lost:
            log(_logger, logging.ERROR, "machine lost", {"machine": self.id, "why": why})
            self.end()

    def end(self) -> None:
        """Ends the machine's actors, and with them all that is on it."""
        import ray

        self._lost.set()
        for actor in (self._actor, self.transfer_actor):
            with suppress(ray.exceptions.RayError, ValueError):
                ray.kill(actor)

    async def call(self, method: str, *arguments: Any) -> Any:
        """Raises MachineLost, and what the method raises."""
        return await self.answer(lambda: getattr(self._actor, method).remote(*arguments))

    async def answer(self, call: Callable[[], Any]) -> Any:
        """The result of a call of one of its actors. Raises the call's error."""
        import ray

        if self.lost:
            raise MachineLost(self.id)
        answer = asyncio.wrap_future(call().future())
        answer.add_done_callback(_looked_at)  # whoever asked may be gone by then
        losing = asyncio.create_task(self._lost.wait())
        try:
            await asyncio.wait((answer, losing), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise MachineLost(self.id)
            return answer.result()
        except ray.exceptions.RayTaskError as error:
            raise error.as_instanceof_cause() from None
        except ray.exceptions.RayError as error:
            self.lose(flattened(error)[:200])
            raise MachineLost(self.id) from None
        finally:
            losing.cancel()

    async def open_regions(self) -> None:
        """Makes host KV of each rank known to the machine's transfer actor. Raises MachineLost."""
        for rank, memory in enumerate(self.opened.memory):
            await self.answer(partial(self.transfer_actor.open.remote, region(rank), memory.host_kv_path))

    def start_call(self, method: str, *arguments: Any) -> None:
        """Sends without waiting for an answer."""
        self._in_background(self.do(method, *arguments))

    async def do(self, method: str, *arguments: Any) -> None:
        """Returns when it has done so, or is lost. Raises what the method raises."""
        await self._unless_lost(self.call(method, *arguments))

    async def compare_clocks(self) -> None:
        """By the quickest of a few answers, which cannot be wrong by more than half the time it took."""
        quickest_ns = None
        for _ in range(_CLOCKS_COMPARED):
            asked_ns = time.monotonic_ns()
            there_ns = await self.call("clock")
            answered_ns = time.monotonic_ns()
            if quickest_ns is None or answered_ns - asked_ns < quickest_ns:
                quickest_ns = answered_ns - asked_ns
                self.clock_ahead_ns = there_ns - (asked_ns + answered_ns) // 2
        if quickest_ns and abs(self.clock_ahead_ns) <= quickest_ns:
            self.clock_ahead_ns = 0  # it is the same clock, as far as can be told

    # --- Machine ------------------------------------------------------------------------------------------------------

    def localised(self, spec: ModelSpec) -> ModelSpec:
        """The spec with the paths that its image has on that machine."""
        here, _, name = spec.directory.rpartition("/images/")
        if not self.opened.cache_dir or here == self.opened.cache_dir:
            return spec
        directory = f"{self.opened.cache_dir}/images/{name}"
        image = spec.image_path.removeprefix(spec.directory)
        return msgspec.structs.replace(spec, directory=directory, image_path=directory + image)

    def has(self, spec: ModelSpec) -> bool:
        """Whether the model's image is on that machine."""
        return (spec.model, spec.manifest.fingerprint) in self.shipped

    def forget_shipped(self, spec: ModelSpec) -> None:
        """The model's image may not be there after all."""
        self.shipped.discard((spec.model, spec.manifest.fingerprint))

    def poison(self, words: Sequence[int]) -> None:
        if not self.lost:
            self.start_call("poison", list(words))

    async def start(self, ranks: Sequence[InstanceSettings]) -> RemoteProcesses:
        key = next(self._keys)
        starting = asyncio.create_task(self.call("start", key, msgspec.msgpack.encode(list(ranks))))
        try:
            pid = await asyncio.shield(starting)
        except MachineLost:
            raise OSError(0, "its machine is lost") from None
        except asyncio.CancelledError:
            self._in_background(self._kill_unwanted(key, starting))
            raise
        return RemoteProcesses(self, key, pid)

    async def _kill_unwanted(self, key: int, starting: asyncio.Task[Any]) -> None:
        """Once it has started."""
        with suppress(OSError, MachineLost):
            await starting
            await self.call("kill", key)

    async def open_pool(self, kind: str, nbytes: int, gpu: str) -> RemotePool | str:
        """The memory pool of the GPU that Ray has by this name, or why there is none. Raises MachineLost."""
        answer = await self.call("open_pool", kind, nbytes, gpu)
        opened = msgspec.msgpack.decode(answer, type=PoolOpened)
        return opened.refusal or RemotePool(self, opened)

    async def has_copied(self, event: EventHandle) -> bool:
        """Whether a copy to the host slabs there ended in time. Raises MachineLost."""
        return bool(await self.call("wait_for_copy", event.word, event.value))

    async def close(self) -> None:
        """Raises nothing: whatever it cannot let go of ends with its actor."""
        if self.lost:
            return
        try:
            async with asyncio.timeout(_KILLED_WITHIN_S):
                await self.call("close")
        except (MachineLost, TimeoutError):
            pass
        except Exception as error:  # noqa: BLE001 - whatever broke over there
            log(_logger, logging.WARNING, "machine did not close", {"machine": self.id, "why": repr(error)})
        finally:
            self.end()

    def answering(self) -> asyncio.Task[None]:
        """Done when its transfer actor has answered, or it is lost."""
        return self._in_background(self._unless_lost(self.answer(self.transfer_actor.__ray_ready__.remote)))

    def _in_background(self, doing: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(doing)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def _unless_lost(self, asking: Awaitable[Any]) -> None:
        with suppress(MachineLost):
            await asking


class RemoteProcesses:
    """Implements `aegis.node.machine.Running`."""

    def __init__(self, machine: RemoteMachine, key: int, pid: int) -> None:
        self.pid = pid
        self._machine = machine
        self._key = key
        self._killing: asyncio.Task[None] | None = None

    def kill(self) -> None:
        if self._killing is None:
            self._killing = asyncio.create_task(self._kill())

    async def wait(self) -> int:
        try:
            return int(await self._machine.call("ended", self._key))
        except MachineLost:
            return _LOST_CODE

    async def _kill(self) -> None:
        """A machine that cannot say soon that it did is lost with all that is on it. It gets longer where its transfer
        actor answers meanwhile: its node is there then, only busy."""
        killed = asyncio.create_task(self._machine.do("kill", self._key))
        there = self._machine.answering()
        await asyncio.wait((killed,), timeout=_KILLED_WITHIN_S)
        if there.done() and not killed.done():
            await asyncio.wait((killed,), timeout=_BUSY_S)
        if not killed.done():
            self._machine.lose("it does not answer")
        await killed


class RemotePool:
    """Implements `aegis.device.protocol.PhysicalPool`. Its memory ends with its machine, if not before."""

    def __init__(self, machine: RemoteMachine, opened: PoolOpened) -> None:
        self.address = opened.address
        self.page_bytes = opened.page_bytes
        self.page_count = opened.page_count
        self._machine = machine
        self._number = opened.number
        self._loop = asyncio.get_running_loop()

    def wipe(self, runs: Sequence[PageRun]) -> None:
        """Wipes the pages over there. Called from a thread, which waits for it."""
        wiping = self._machine.call("wipe", self._number, [tuple(run) for run in runs])
        with suppress(MachineLost):
            asyncio.run_coroutine_threadsafe(wiping, self._loop).result()

    async def end(self) -> None:
        """The image is nowhere on the machine any more."""
        with suppress(MachineLost):
            await self._machine.call("end_pool", self._number)

    def close(self) -> None: ...


class RemoteFiller:
    """Implements `aegis.node.image_cache.Filler`."""

    def __init__(self, machine: RemoteMachine) -> None:
        self._machine = machine

    @property
    def extents(self) -> int:
        return self._machine.opened.extents

    def fill(self, spec: ModelSpec, runs: Runs) -> asyncio.Task[Filled]:
        return asyncio.create_task(self._fill(spec, runs))

    def abandon(self, model: str) -> None:
        self._machine.start_call("abandon_fill", model)

    async def _fill(self, spec: ModelSpec, runs: Runs) -> Filled:
        order = msgspec.msgpack.encode(self._machine.localised(spec))
        try:
            return Filled(*await self._machine.call("fill", order, [tuple(run) for run in runs]))
        except MachineLost:
            return Filled(whole=False)


def region(rank: int) -> str:
    """The name that transfer actors have for a rank's host KV."""
    return f"kv-{rank}"


def _looked_at(answer: asyncio.Future[Any]) -> None:
    """Reads the result of a task that nothing waits for any more."""
    if not answer.cancelled():
        answer.exception()
