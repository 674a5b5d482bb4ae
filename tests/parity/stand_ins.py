"""Stand-ins for the parts that are not real in a run that is otherwise live: the link, the engine, the device's bytes,
the processes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass

from aegis.core.effects import AbandonLoad, CopyBlocks, Effect, LoadWeights, Run, WipePages
from aegis.core.events import Progress
from aegis.core.ids import InstanceId, MachineId, ModelId, PageRun, ProxyId, RequestId
from aegis.core.messages import FromInstance, Greeting, ToInstance
from aegis.core.model import ModelSpec
from aegis.core.request import Sampling, Token
from aegis.core.role import Role
from aegis.device.memory_executor import CopyDone
from aegis.engine.protocol import Sampled, StepRow
from aegis.node.image_cache import ImageCache
from aegis.node.image_caches import ImageCaches
from aegis.node.image_filler import Filled
from aegis.sim.copies import Copy, Links, Streams
from aegis.sim.flows import Link
from aegis.sim.instance import END
from aegis.sim.step_costs import StepCosts
from aegis.sim.timeline_semaphores import TimelineSemaphores
from aegis.transport.links import addressed
from memory.budget import Budget
from memory.machines_kv import MachinesKv
from memory.pages import Runs
from tests.parity.conductor import Actor, Conductor
from tests.parity.virtual_loop import VirtualLoop

MACHINE = MachineId("")
"""The only one."""


class Wire:
    """Messages take `message_ns` either way, and none overtakes another, whoever they are for."""

    def __init__(self, conductor: Conductor, loop: VirtualLoop, message_ns: int) -> None:
        self._conductor = conductor
        self._loop = loop
        self._message_ns = message_ns
        self._ends: dict[str, InstanceEnd] = {}
        self._hubs: dict[ProxyId | None, HubEnd] = {}

    @property
    def ends(self) -> list[InstanceEnd]:
        return list(self._ends.values())

    def hub(self, proxy: ProxyId | None) -> HubEnd:
        """The node's, or a proxy's."""
        hub = self._hubs[proxy] = HubEnd(self)
        return hub

    def end(self, instance: InstanceId, actor: Actor) -> InstanceEnd:
        end = self._ends[instance] = InstanceEnd(self, instance, actor, self._conductor)
        return end

    def send(self, identity: str, messages: Sequence[ToInstance]) -> None:
        agenda = self._conductor.agenda
        agenda.at(agenda.now_ns + self._message_ns, self._ends[identity.partition("/")[0]].deliver, list(messages))

    def greet(self, identity: str, proxy: ProxyId, greeting: Greeting) -> None:
        agenda = self._conductor.agenda
        arrived = self._hubs[proxy].arrived
        agenda.at(agenda.now_ns + self._message_ns, self._loop.happen, arrived.put_nowait, (identity, [greeting]))

    def from_instance(self, identity: str, messages: Sequence[FromInstance]) -> None:
        agenda = self._conductor.agenda
        for each in messages:
            for proxy, its in addressed([each], self._hubs.keys() - {None}).items():
                arrived = self._hubs[proxy].arrived
                agenda.at(agenda.now_ns + self._message_ns, self._loop.happen, arrived.put_nowait, (identity, its))


class HubEnd:
    """As `Hub`."""

    address = ""

    def __init__(self, wire: Wire) -> None:
        self.arrived: asyncio.Queue[tuple[str, list[FromInstance]]] = asyncio.Queue()
        self.send = wire.send

    async def receive(self) -> tuple[str, list[FromInstance]]:
        return await self.arrived.get()


class InstanceEnd:
    """As `InstanceLink`."""

    def __init__(self, wire: Wire, instance: InstanceId, actor: Actor, conductor: Conductor) -> None:
        self._wire = wire
        self._instance = instance
        self._actor = actor
        self._conductor = conductor
        self._arrived: list[ToInstance] = []

    def deliver(self, messages: list[ToInstance]) -> None:
        self._arrived += messages
        self._actor.nudge()

    def send(self, messages: Sequence[FromInstance]) -> None:
        self._wire.from_instance(f"{self._instance}/1", messages)

    def meet(self, proxy: ProxyId, address: str, greeting: Greeting) -> None:
        self._wire.greet(f"{self._instance}/1", proxy, greeting)

    def receive(self, timeout_ns: int) -> list[ToInstance]:
        if timeout_ns and not self._arrived:
            self._actor.wait(self._conductor.now_ns() + timeout_ns, listening=True)
        arrived, self._arrived = self._arrived, []
        return arrived


class ScriptedEngine:
    """Its steps take as long as `costs` say, and a request's answer is as long as `lengths` says. As `Engine`."""

    def __init__(
        self,
        conductor: Conductor,
        actor: Actor,
        costs: Mapping[ModelId, StepCosts],
        lengths: Mapping[RequestId, int],
    ) -> None:
        self._conductor = conductor
        self._actor = actor
        self._costs = costs
        self._lengths = lengths
        self._made: dict[RequestId, int] = {}
        self._prompts: set[RequestId] = set()  # of the run under way

    def begins(self, run: Run) -> None:
        """What a row is of decides how long it takes: the last token of a prompt looks like one that decodes."""
        self._prompts = {row.job.request for row in run.prompts}

    def prepare(self, spec: ModelSpec) -> None: ...

    def discard(self, spec: ModelSpec) -> None: ...

    def attach(self, spec: ModelSpec, weights_base: int) -> None: ...

    def detach(self, model: ModelId) -> None: ...

    def ready(self, model: ModelId, sampling: Sampling) -> bool:
        return True

    def start(
        self,
        model: ModelId,
        request: RequestId,
        prompt: Sequence[int],
        generated: Sequence[int],
        sampling: Sampling,
    ) -> None:
        self._made[request] = len(generated)

    def stop(self, request: RequestId) -> None:
        self._made.pop(request, None)

    def extends(self, model: ModelId) -> bool:
        return True

    def step(self, model: ModelId, rows: Sequence[StepRow]) -> list[Sampled | None]:
        costs = self._costs[model]
        pieces = [(row.start, row.stop) for row in rows if row.request in self._prompts]
        single = [row.start for row in rows if row.request not in self._prompts]
        if pieces:
            self._work(costs.step_ns(pieces, sum(single), len(single)))
        else:
            self._work(costs.decode_ns(sum(single), len(single)))
        return [self._token(row.request) if row.samples else None for row in rows]

    def _work(self, duration_ns: int) -> None:
        self._actor.wait(self._conductor.now_ns() + duration_ns, listening=False)

    def _token(self, request: RequestId) -> Sampled:
        made = self._made[request] = self._made[request] + 1
        return Sampled(Token(END if made >= self._lengths[request] else 0))


class ScriptedMover:
    """Copies nothing, in the time it takes. As `Mover`."""

    def __init__(
        self,
        semaphores: TimelineSemaphores,
        *,
        to_device: Link,
        to_host: Link,
        actor: Actor,
        specs: Mapping[ModelId, ModelSpec],
    ):
        self._streams = Streams(semaphores, Links(to_device, to_host), done=self._done)
        self._actor = actor
        self._specs = specs

    @property
    def in_flight(self) -> bool:
        return self._streams.in_flight

    @property
    def peer_load_bytes(self) -> int:
        return 0

    def perform(self, effect: Effect) -> None:
        match effect:
            case LoadWeights(model=model):
                self._streams.load(effect, self._specs[model].manifest.image_bytes)
            case CopyBlocks():
                self._streams.copy(effect)
            case WipePages():
                self._streams.wipe(effect)
            case AbandonLoad(event):
                self._streams.abandon(event)

    def weights_base(self, bind: object) -> int:
        return 0

    def progress(self) -> list[Progress]:
        return self._streams.progress()

    def copied(self) -> list[CopyDone]:
        return []

    def _done(self, copy: Copy) -> None:
        self._actor.nudge()


class NoDevice:
    """As `Device`, as far as an instance itself needs one."""

    device_wide = 0


@dataclass(frozen=True, slots=True)
class CountedPool:
    """As `PhysicalPool`; no memory behind it."""

    page_count: int
    page_bytes: int
    address: str = ""

    def wipe(self, runs: Sequence[PageRun]) -> None: ...

    def close(self) -> None: ...


class NoImages:
    """As `ImageFiller`, of no memory."""

    extents = 0

    def fill(self, spec: ModelSpec, runs: Runs) -> Awaitable[Filled]:
        raise AssertionError("there is no extent to fill")

    def abandon(self, model: ModelId) -> None: ...


def no_images() -> ImageCaches:
    """A model cache of no memory, on the only machine."""
    images = ImageCaches()
    images.open(MACHINE, ImageCache(NoImages()))
    return images


def host(budget: Budget) -> MachinesKv:
    """Host memory of the only machine."""
    of_one = MachinesKv(budget.slab_bytes)
    of_one.open(MACHINE, budget.host_slabs)
    return of_one


class Processes:
    """As `Pool`, of processes that never end. They are called what they are."""

    def __init__(self, roles: Mapping[InstanceId, Role]) -> None:
        self._roles = roles

    def role(self, instance: InstanceId) -> Role:
        return self._roles[instance]

    def roles(self) -> dict[InstanceId, Role]:
        return dict(self._roles)

    def staying(self) -> dict[InstanceId, Role]:
        return self.roles()

    def states(self) -> dict[InstanceId, str]:
        return dict.fromkeys(self._roles, "up")

    def is_prefill(self, instance: InstanceId) -> bool:
        return self._roles[instance] is Role.PREFILL

    def words(self, instance: InstanceId) -> tuple[int, ...]:
        return (sorted(self._roles).index(instance),)

    def machine(self, instance: InstanceId) -> MachineId:
        return MACHINE

    def localised(self, instance: InstanceId, spec: ModelSpec) -> ModelSpec:
        return spec

    def identity(self, instance: InstanceId) -> str:
        return f"{instance}/1"

    def sender(self, identity: str) -> InstanceId:
        return InstanceId(identity.partition("/")[0])

    def became_ready(self, instance: InstanceId) -> None: ...

    def coming(self) -> set[InstanceId]:
        return set()

    def drained(self, instance: InstanceId) -> bool:
        return False

    def dead(self) -> set[InstanceId]:
        return set()

    def hopeless(self) -> bool:
        return False
