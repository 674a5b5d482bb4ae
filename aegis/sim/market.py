"""The simulated world that measures time: the router that serves, over simulated instances, from arrivals to records.

What instances are told goes over the same memory accounts as in the other world (`NodeMemory`). A message takes
`message_ns` either way and none overtakes another.

There are two worlds for a reason. Here time is what counts: runs and copies last as the cost models say, a run of a
hundred steps is one event, tokens and memory have no content, and nothing fails, so that hours of 80 models take
minutes. `aegis.sim.faults.world` is about contents: every step reads the KV that is there, every page has an owner, and
everything goes wrong, which takes an event for each step and a dictionary for each block. They share what is not about
that: the queue of events, the streams of copies and what these wait for, the node's memory, and what performs the
effects of cores.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from aegis.core.decision import Decision
from aegis.core.errors import LawBroken
from aegis.core.ids import InstanceId, ModelId, RequestId
from aegis.core.lifecycle import State
from aegis.core.messages import (
    CheckPrefix,
    FromInstance,
    GrantPages,
    SwitchDone,
    TakeBack,
    ToInstance,
    UnloadModel,
)
from aegis.core.model import ModelSpec
from aegis.core.request import Failure, Job, Sampling
from aegis.core.views import Work
from aegis.sim.effects import RouterEffects
from aegis.sim.event_queue import EventQueue
from aegis.sim.fetched_images import FetchedImages
from aegis.sim.flows import Link
from aegis.sim.instance import END, SimInstance
from aegis.sim.node_memory import FOR_NODE, NodeEffect, NodeMemory
from aegis.sim.reused_prefixes import ReusedPrefixes
from aegis.sim.timeline_semaphores import TimelineSemaphores
from aegis.sim.times import Times
from aegis.telemetry.decisions import DecisionLog
from aegis.telemetry.records import REFUSED, Record
from aegis.telemetry.spans import Span
from memory.page_arbiter import TICK_NS, PageArbiter
from memory.peers.links import PeerLinks
from proxy.routing.events import ClientLeft, Ended, Event, MessageReceived, ModelMoved, RequestArrived
from proxy.routing.placement import LOOK_NS, Evict, Placement, PoolSampled
from proxy.routing.placement_views import InstanceView
from proxy.routing.router import Router

_ALONE: Final = (GrantPages, TakeBack)
"""Messages that leave one by one, as the live node's devices send them."""

_NO_ADAPTERS: Final[Mapping[ModelId, ModelId]] = {}

_ENDED: Final = {State.FINISHED: "finished", State.FAILED: "failed", State.CANCELLED: "cancelled"}


@dataclass(frozen=True, slots=True)
class SimRequest:
    """A request as the workload has it. The output length is known to the world alone; `leaves_ns` is when its client
    loses interest, if it does."""

    at_ns: int
    model: ModelId
    input_tokens: int
    output_tokens: int
    leaves_ns: int | None = None
    priority: int = 0
    reused_tokens: int = 0  # of the input, whose KV is there


class _Fate:
    """A request under way. `asked` is the model that its client named; it may be an adapter, of the model that the job
    names."""

    __slots__ = ("asked", "due_ns", "first_ns", "job", "last_ns", "left", "on_time", "output_tokens", "tbt_ns", "times")

    def __init__(self, job: Job, asked: ModelId, spec: ModelSpec, output_tokens: int, *, keep: bool) -> None:
        self.job = job
        self.asked = asked
        self.due_ns = spec.slo.due_ns(job.arrival_ns, 0)
        self.tbt_ns = spec.slo.tbt_ns
        self.output_tokens = self.left = output_tokens
        self.on_time = 0
        self.first_ns: int | None = None
        self.last_ns: int | None = None
        self.times: list[int] | None = [] if keep else None

    def made(self, index: int, times: Times, late_ns: int) -> None:
        """Tokens were made that the client sees `late_ns` later."""
        self.left = self.output_tokens - index - times.steps
        if self.first_ns is None:
            self.first_ns = times.of(0) + late_ns
        self.last_ns = times.of(times.steps - 1) + late_ns
        self.on_time += times.in_time(self.due_ns + index * self.tbt_ns - late_ns, self.tbt_ns)
        if self.times is not None:
            self.times += [times.of(step) + late_ns for step in range(times.steps)]


_SAMPLING: Final = Sampling(max_tokens=4096, stop_token_ids=(END,))
"""The tokens that a client asks for. A client with a longer answer asks for all that the context has room for."""


class SimMarket:
    """`arrivals` in order of time. `keep_times` keeps when each token came, `spans` what instances did."""

    def __init__(
        self,
        router: Router,
        agenda: EventQueue,
        *,
        specs: Mapping[ModelId, ModelSpec],
        host_slabs: int,
        message_ns: int,
        keep_times: bool = False,
        keep_spans: bool = False,
        decisions: DecisionLog | None = None,
        slab_bytes: int = 0,
        reuses: bool = False,
        placement: Placement | None = None,
        refuses_late: bool = False,
        adapters: Mapping[ModelId, ModelId] = _NO_ADAPTERS,
        images: FetchedImages | None = None,
    ) -> None:
        """`slab_bytes` matter where it `reuses` KV. If it `refuses_late`, the proxy does. Requests for one of the
        `adapters` are run as those of its base: one batch, one residency. `images` are those that may have to be
        fetched first."""
        self.agenda = agenda
        self.semaphores = TimelineSemaphores()
        self.instances: dict[InstanceId, SimInstance] = {}
        self.records: list[Record] = []
        self.switches: list[SwitchDone] = []
        self.spans: list[Span] | None = [] if keep_spans else None
        self.decided: list[Decision] = []  # and why, where the cores explain that
        self._specs = specs
        self._message_ns = message_ns
        self._keep_times = keep_times
        self._reuses = reuses
        self._refuses_late = refuses_late
        self._adapters = adapters
        self._images = images
        self._fetching = 0  # requests that wait for an image
        self.decisions = decisions
        self._outbox: defaultdict[InstanceId, list[ToInstance]] = defaultdict(list)
        self._memory = NodeMemory(host_slabs, slab_bytes, specs.get)
        self._reused = ReusedPrefixes()
        host = self._memory.host if reuses else self._reused
        self._core, self._placement = router, placement
        self._devices: dict[InstanceId, tuple[tuple[int, ...], int]] = {}
        self.moves: list[ModelMoved] = []
        self._router = RouterEffects(
            router, host, send=self._put, ended=self._ended, decided=self._decided, moved=self._moved
        )
        self._fates: dict[RequestId, _Fate] = {}
        self._prompts: dict[int, tuple[int, ...]] = {}
        self._left: dict[RequestId, int] = {}  # the full lengths of their answers
        self._arrived = 0
        self._awaited = True  # more will arrive

    def join(
        self,
        instance: SimInstance,
        arbiter: PageArbiter,
        links: PeerLinks | None = None,
        *,
        device: int = 0,
        memory_bytes: int = 0,
    ) -> None:
        """Before anything is told to the router about it. `links` are those of its machine, if devices carry for each
        other."""
        self.instances[instance.instance] = instance
        self._devices[instance.instance] = (device,), memory_bytes
        self._memory.join(instance.instance, arbiter, links)

    def watch(self) -> None:
        """From now on the arbiters of memory are told that time passes, as long as there are requests."""
        self.agenda.at(self.agenda.now_ns + TICK_NS, self._tick)

    def place(self) -> None:
        """From now on placement looks at the market, as long as there are requests."""
        if self._placement:
            self.agenda.at(self.agenda.now_ns + LOOK_NS, self._look)

    def tell(self, event: Event) -> None:
        """An event from outside the instances."""
        self._router.tell(event, self.agenda.now_ns)
        self._flush()

    def run(self, arrivals: Iterable[SimRequest]) -> None:
        """Runs until every request has ended."""
        self._next(iter(arrivals))
        self.agenda.run()
        if self._fates or self._fetching:
            raise LawBroken(f"{len(self._fates) + self._fetching} requests never ended")

    # --- for its instances --------------------------------------------------------------------------------------------

    def output_tokens(self, request: RequestId) -> int:
        fate = self._fates.get(request)
        return fate.output_tokens if fate else self._left[request]  # its client has left, the message is on its way

    def left(self, request: RequestId) -> int:
        """The knowledge of an oracle: the number of tokens that the request has still to make."""
        fate = self._fates.get(request)
        return fate.left if fate else 0

    def made(self, request: RequestId, index: int, times: Times) -> None:
        fate = self._fates.get(request)
        if fate:
            fate.made(index, times, self._message_ns)

    def link_of(self, instance: InstanceId) -> Link:
        return self.instances[instance].to_device

    def hear(self, instance: InstanceId, messages: list[FromInstance]) -> None:
        self.agenda.at(self.agenda.now_ns + self._message_ns, self._heard, instance, messages)

    # --- arrivals and ends --------------------------------------------------------------------------------------------

    def _next(self, arrivals: Iterator[SimRequest]) -> None:
        wanted = next(arrivals, None)
        self._awaited = wanted is not None
        if wanted is not None:
            self.agenda.at(wanted.at_ns, self._arrive, wanted, arrivals)

    def _arrive(self, wanted: SimRequest, arrivals: Iterator[SimRequest]) -> None:
        self._arrived += 1
        request, model = RequestId(self._arrived), self._adapters.get(wanted.model, wanted.model)
        if self._images is None:
            self._submit(request, model, wanted)
        else:
            self._fetching += 1
            self._images.want(model, lambda there: self._fetched(request, model, wanted, there=there))
        self._next(arrivals)

    def _fetched(self, request: RequestId, model: ModelId, wanted: SimRequest, *, there: bool) -> None:
        """The image is there, or cannot be. A client that has left meanwhile is not served."""
        self._fetching -= 1
        left = wanted.leaves_ns is not None and wanted.leaves_ns <= self.agenda.now_ns
        if there and not left:
            self._submit(request, model, wanted)
        else:
            self._unserved(self._job(request, model, wanted), wanted, "cancelled" if left else "failed")

    def _submit(self, request: RequestId, model: ModelId, wanted: SimRequest) -> None:
        job = self._job(request, model, wanted)
        work = Work(job.model, len(job.prompt))
        if self._refuses_late and self._core.admission.late_ns(work, job.priority, job.arrival_ns) is not None:
            self._unserved(job, wanted, REFUSED)
            return
        self._reused.note(request, wanted.reused_tokens, len(job.prompt))
        spec = self._specs[model]
        self._fates[request] = _Fate(job, wanted.model, spec, wanted.output_tokens, keep=self._keep_times)
        self.tell(RequestArrived(job, refusable=self._refuses_late))
        if wanted.leaves_ns is not None:
            self.agenda.at(wanted.leaves_ns, self.tell, ClientLeft(request))

    def _job(self, request: RequestId, model: ModelId, wanted: SimRequest) -> Job:
        prompt, sampling = self._prompt(wanted.input_tokens), _SAMPLING
        if wanted.output_tokens > sampling.max_tokens:
            room = self._specs[model].manifest.context_tokens - len(prompt)
            sampling = Sampling(max_tokens=room, stop_token_ids=(END,))
        return Job(request, 1, model, prompt, sampling, wanted.at_ns, priority=wanted.priority)

    def _prompt(self, tokens: int) -> tuple[int, ...]:
        prompt = self._prompts.get(tokens)
        if prompt is None:
            prompt = self._prompts[tokens] = (0,) * tokens
        return prompt

    def _ended(self, ended: Ended) -> None:
        fate = self._fates.pop(ended.request)
        self._reused.forget(ended.request)
        job = fate.job
        if self._images is not None:
            self._images.ended(job.model)
        if ended.state is not State.FINISHED:
            self._left[ended.request] = fate.output_tokens
        self.records.append(
            Record(
                request=job.request,
                model=fate.asked,
                arrival_ns=job.arrival_ns,
                input_tokens=len(job.prompt),
                output_tokens=fate.output_tokens,
                ended=REFUSED if ended.failure is Failure.WOULD_BE_LATE else _ENDED[ended.state],
                on_time=fate.on_time,
                first_ns=fate.first_ns,
                last_ns=fate.last_ns,
                token_times_ns=tuple(fate.times or ()),
            )
        )

    def _unserved(self, job: Job, wanted: SimRequest, ended: str) -> None:
        """The request is not served: nothing but its record is kept."""
        if self._images is not None:
            self._images.ended(job.model)
        self.records.append(
            Record(
                request=job.request,
                model=wanted.model,
                arrival_ns=job.arrival_ns,
                input_tokens=len(job.prompt),
                output_tokens=wanted.output_tokens,
                ended=ended,
                on_time=0,
            )
        )

    # --- messages -----------------------------------------------------------------------------------------------------

    def _put(self, instance: InstanceId, message: ToInstance) -> None:
        self._outbox[instance].append(message)
        if self.decisions:
            self.decisions.sent(instance, message, self.agenda.now_ns)

    def _decided(self, decision: Decision) -> None:
        self.decided.append(decision)
        if self.decisions:
            self.decisions.explained(decision)

    def _flush(self) -> None:
        """All messages to one instance leave together."""
        if not self._outbox:
            return
        for instance, messages in self._outbox.items():
            self.agenda.at(self.agenda.now_ns + self._message_ns, self.instances[instance].tell, messages)
        self._outbox.clear()

    def _heard(self, instance: InstanceId, messages: list[FromInstance]) -> None:
        for message in messages:
            if type(message) is CheckPrefix and not self._reuses:
                self._put(instance, self._reused.answers(message))
                continue
            if type(message) in FOR_NODE:
                self._answer(self._memory.hear(instance, message, self.agenda.now_ns))
                continue
            if type(message) is SwitchDone:
                self.switches.append(message)
            self._router.tell(MessageReceived(instance, message), self.agenda.now_ns)
        self._flush()

    def _tick(self) -> None:
        self._answer(self._memory.tick(self.agenda.now_ns))
        if self._fates or self._fetching or self._awaited:
            self.watch()

    # --- placement ----------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        models, loads = self._core.sample()
        views = tuple([InstanceView(name, *self._devices[name], placed) for name, placed in loads.items()])
        self._place_as(PoolSampled(models, views))
        if self._fates or self._fetching or self._awaited:
            self.place()

    def _moved(self, moved: ModelMoved) -> None:
        self.moves.append(moved)
        self._place_as(moved)

    def _place_as(self, event: PoolSampled | ModelMoved) -> None:
        """Does what placement decides at once, as a live launcher does, which is beside its proxy."""
        for effect in self._placement.on(event, self.agenda.now_ns) if self._placement else ():
            if isinstance(effect, Evict):
                self._put(effect.instance, UnloadModel(effect.model))
                self._flush()
            else:
                self.tell(effect)

    def _answer(self, effects: list[NodeEffect]) -> None:
        """The node does nothing but answer here, since nobody is lost and nothing is commanded."""
        for effect in effects:
            assert isinstance(effect, tuple)
            self._put(*effect)
            if isinstance(effect[1], _ALONE):
                self._flush()
