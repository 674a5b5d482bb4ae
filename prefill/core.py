"""The prefill core: a queue of groups, one prefill at a time, KV handed over through the node's host slabs.

`on(event, now_ns) -> effects`; no clock, no I/O. A job goes waiting → running → handed over, or ends with its first
token. What a job will need is reserved before its prefill starts: device blocks for its KV and host blocks to put them
(reserve, acquire, forfeit), so a prefill that has run can always be handed over. A group stays in front until its last
job has run: a request that joins it meanwhile still finds it there, as Algorithm 1 has it.

While one model prefills, the model of the next group is brought in, if there is room that nobody needs more.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from aegis.core.effects import Effect, RunPrefill, Send, Untrack
from aegis.core.events import InstanceEvent, Progress, StepFailed, Stepped
from aegis.core.ids import BlockId, InstanceId, ModelId, RequestId
from aegis.core.messages import (
    AddModel,
    Adopt,
    Broken,
    Cancel,
    DropModel,
    ForgetPeer,
    FromInstance,
    GrantSlabs,
    ModelAdded,
    ModelDropped,
    ModelFailed,
    NeedSlabs,
    PeerForgotten,
    Prefilled,
    PromptLogprobs,
    ReleaseKv,
    ReturnSlabs,
    Shutdown,
    Started,
    Submit,
    Tokens,
)
from aegis.core.model import KvShape
from aegis.core.request import EventHandle, Job, KvHandle, Token
from aegis.core.switching import Switching
from memory.ledger import Ledger
from memory.pages import NoPages
from memory.slabs import NoBlocks


@dataclass(slots=True)
class _Group:
    group: int
    model: ModelId
    jobs: deque[Job] = field(default_factory=deque)


@dataclass(slots=True)
class _Running:
    job: Job
    device: tuple[BlockId, ...]
    host: tuple[BlockId, ...]  # empty when the first token is sure to be the last
    cancelled: bool = False


@dataclass(slots=True)
class _Handed:
    """KV in our host slabs until the decode instance has it; the swap-out that fills it is `event`."""

    shape: KvShape
    host: tuple[BlockId, ...]
    event: EventHandle


@dataclass(slots=True)
class Counters:
    """Since the process started."""

    switches: int = 0
    prefills: int = 0
    prompt_tokens: int = 0
    swap_out_bytes: int = 0
    prefetches: int = 0


class PrefillCore:
    """One prefill instance."""

    def __init__(self, instance: InstanceId, ledger: Ledger) -> None:
        self.instance = instance
        self.ledger = ledger
        self.counters = Counters()
        self.active: ModelId | None = None
        self._queue: deque[_Group] = deque()
        self._running: _Running | None = None
        self._handed: dict[tuple[RequestId, int], _Handed] = {}
        self._switch: Switching | None = None
        self._dropping: set[ModelId] = set()
        self._asked_slabs = False
        self._out: list[Effect] = []

    def on(self, event: InstanceEvent, now_ns: int) -> list[Effect]:
        """Takes one event; returns what to do, in order."""
        match event:
            case Submit():
                self._submit(event)
            case Stepped():
                self._stepped(event)
            case StepFailed():
                self._step_failed(event)
            case Progress():
                self.ledger.progress(event.stream, event.value)
            case Cancel():
                self._cancel(event.request, event.attempt)
            case ReleaseKv():
                self._release((event.request, event.attempt))
            case GrantSlabs():
                self.ledger.grant(event.slabs)
                self._asked_slabs = event.refused and self._asked_slabs
            case AddModel():
                self._add_model(event)
            case DropModel():
                self._drop_model(event.model)
            case ForgetPeer():
                self._send(PeerForgotten(event.peer))  # a prefill instance reads nobody's slabs
            case Adopt() | Shutdown():
                raise AssertionError(f"not for a prefill instance: {event}")
        begun = self._advance(now_ns)
        self._return_slabs()
        self._flush()
        if begun:
            self._out.append(RunPrefill(begun.job, begun.device))
        out, self._out = self._out, []
        return out

    @property
    def queued(self) -> int:
        return sum(len(group.jobs) for group in self._queue)

    @property
    def running(self) -> int:
        return int(self._running is not None)

    @property
    def handed(self) -> int:
        """Requests whose KV still lies in our host slabs."""
        return len(self._handed)

    def _submit(self, event: Submit) -> None:
        for group in self._queue:
            if group.group == event.group:
                assert group.model == event.job.model
                group.jobs.append(event.job)
                return
        self._queue.append(_Group(event.group, event.job.model, deque([event.job])))

    def _cancel(self, request: RequestId, attempt: int) -> None:
        """What was handed over already is left to `ReleaseKv`: whoever cancels learns of the handle and sends it."""
        running = self._running
        if running and (running.job.request, running.job.attempt) == (request, attempt):
            running.cancelled = True
            return
        for group in self._queue:
            for job in group.jobs:
                if (job.request, job.attempt) == (request, attempt):
                    group.jobs.remove(job)
                    return

    def _release(self, key: tuple[RequestId, int]) -> None:
        handed = self._handed.pop(key)
        if self.ledger.transfers.passed(handed.event):
            self.ledger.host.free(handed.shape, handed.host)
        else:
            self.ledger.host.free_after(handed.shape, handed.host, handed.event)

    def _add_model(self, event: AddModel) -> None:
        added = self.ledger.add_model(event.spec)
        model = event.spec.model
        self._send(ModelAdded(model) if added else ModelFailed(model, "no address space is left"))

    def _advance(self, now_ns: int) -> _Running | None:
        """What begins to run, if anything: the step is the last thing an event asks for, all else being under way."""
        self._drop_models()
        begun = self._start_next(now_ns) if self._running is None else None
        self._prefetch()
        return begun

    def _start_next(self, now_ns: int) -> _Running | None:
        """(1) Bring the model in; (2) reserve device and host blocks; (3) run. What is lacking comes with an event."""
        while self._queue and not self._queue[0].jobs:
            self._queue.popleft()
        if not self._queue or not self._bring_in(self._queue[0].model, now_ns):
            return None
        group = self._queue[0]
        self._running = self._reserve(group.jobs[0])
        if self._running:
            group.jobs.popleft()
            self._activate(group.model, now_ns)
            self._send(Started(self._running.job.request, self._running.job.attempt))
        return self._running

    def _bring_in(self, model: ModelId, now_ns: int) -> bool:
        weights = self.ledger.weights
        if self.active is not None and not weights.is_resident(self.active):
            self.active = None
        if self._switch is None or self._switch.model != model:
            self._switch = Switching(model, now_ns) if model != self.active else None
        if weights.is_resident(model):
            if self._switch:
                self._switch.loaded(now_ns)
            return True
        if not weights.is_loading(model):
            started = self.ledger.load(model, self._expendable(model))
            if not isinstance(started, NoPages) and self._switch:
                self._switch.loading_ns = now_ns
        return False

    def _needed(self) -> list[ModelId]:
        """Models with waiting jobs, those needed first first."""
        return list(dict.fromkeys(group.model for group in self._queue if group.jobs))

    def _expendable(self, needed: ModelId) -> list[ModelId]:
        """Resident models, those needed last first: unqueued ones before queued ones."""
        order = {model: position for position, model in enumerate(self._needed())}
        keep = {needed, self._running.job.model} if self._running else {needed}
        candidates = [model for model in self.ledger.weights.resident() if model not in keep]
        return sorted(candidates, key=lambda model: (-order.get(model, len(order)), model))

    def _reserve(self, job: Job) -> _Running | None:
        shape, device, host = self.ledger.specs[job.model].manifest.kv, self.ledger.device, self.ledger.host
        count = shape.blocks_for(job.prefill_tokens)
        to_host = 0 if len(job.sent) + 1 >= job.sampling.max_tokens else count
        for victim in self._expendable(job.model):
            if device.room(shape) >= count:
                break
            self.ledger.evict(victim)
        if device.room(shape) < count:
            return None  # blocks on their way out come back with Progress
        if host.room(shape) < to_host:
            self._ask_slabs(shape, to_host)
            return None
        on_device, in_host = device.alloc(shape, count), host.alloc(shape, to_host)
        assert not isinstance(on_device, NoBlocks) and not isinstance(in_host, NoBlocks)
        return _Running(job, on_device, in_host)

    def _ask_slabs(self, shape: KvShape, count: int) -> None:
        """Who waits holds nothing idle: instances that hoard would wait for each other for ever."""
        if not self._asked_slabs:
            self._asked_slabs = True
            self._return_slabs()
            short = count - self.ledger.host.room(shape)
            self._send(NeedSlabs(-(-short // self.ledger.host.per_slab(shape))))

    def _activate(self, model: ModelId, now_ns: int) -> None:
        switch, self._switch = self._switch, None
        if switch:
            self.active = model
            self.counters.switches += 1
            self._send(switch.done(now_ns, nbytes=self.ledger.specs[model].manifest.image_bytes))

    def _prefetch(self) -> None:
        """The next group's model, while this one prefills; never at the cost of what the queue needs sooner: models,
        and room for the KV of the running group's jobs."""
        if self._running is None or self.ledger.weights.loading():
            return
        current, needed = self._running.job.model, self._needed()
        model = next((model for model in needed if model != current), None)
        if model is None or self.ledger.weights.is_resident(model):
            return
        idle = [victim for victim in self._expendable(model) if victim not in needed]
        if not isinstance(self.ledger.load(model, idle, spare=self._spare_pages()), NoPages):
            self.counters.prefetches += 1

    def _spare_pages(self) -> int:
        """Pages that the largest job left in the running group may take."""
        group = self._queue[0]
        shape = self.ledger.specs[group.model].manifest.kv
        blocks = max((shape.blocks_for(job.prefill_tokens) for job in group.jobs), default=0)
        return -(-blocks // self.ledger.device.per_slab(shape)) * self.ledger.budget.pages_per_slab

    def _stepped(self, event: Stepped) -> None:
        running, self._running = self._running, None
        assert running is not None
        job, (token,) = running.job, event.tokens
        shape = self.ledger.specs[job.model].manifest.kv
        self.counters.prefills += 1
        self.counters.prompt_tokens += job.prefill_tokens
        self._out.append(Untrack(job.request))
        finish = job.finish(len(job.sent), token.id)
        self.ledger.device.commit(shape, running.device)
        if running.cancelled or finish:
            self.ledger.device.free(shape, running.device)
            self.ledger.host.free(shape, running.host)
            if not running.cancelled:
                self._report_prompt(job, event)
                self._send(Tokens(job.request, job.attempt, len(job.sent), (token,), finish))
            return
        self._report_prompt(job, event)
        self._hand_over(running, shape, token, event.duration_ns)

    def _step_failed(self, event: StepFailed) -> None:
        running, self._running = self._running, None
        assert running is not None
        job, shape = running.job, self.ledger.specs[running.job.model].manifest.kv
        self._out.append(Untrack(job.request))
        self.ledger.device.free(shape, running.device)
        self.ledger.host.free(shape, running.host)
        if not running.cancelled:
            self._send(Broken(job.request, job.attempt, event.reason))

    def _report_prompt(self, job: Job, event: Stepped) -> None:
        if event.prompt:
            self._send(PromptLogprobs(job.request, job.attempt, event.prompt))

    def _hand_over(self, running: _Running, shape: KvShape, token: Token, duration_ns: int) -> None:
        job = running.job
        ready = self.ledger.copy_out(shape, running.device, running.host)
        self.ledger.device.free_after(shape, running.device, ready)
        self.ledger.host.commit(shape, running.host)
        self.counters.swap_out_bytes += shape.block_bytes * len(running.host)
        self._handed[(job.request, job.attempt)] = _Handed(shape, running.host, ready)
        kv = KvHandle(self.instance, running.host, job.prefill_tokens, ready)
        self._send(Prefilled(job.request, job.attempt, token, kv, duration_ns))

    def _drop_model(self, model: ModelId) -> None:
        if model in self.ledger.specs:
            self._dropping.add(model)
        else:
            self._send(ModelDropped(model))  # it could not be added

    def _drop_models(self) -> None:
        for model in sorted(self._dropping):
            busy = self.ledger.weights.is_loading(model) or (self._running and self._running.job.model == model)
            if busy or any(group.model == model and group.jobs for group in self._queue):
                continue
            self.ledger.drop_model(model)
            self._dropping.remove(model)
            self.active = None if self.active == model else self.active
            self._switch = None if self._switch and self._switch.model == model else self._switch
            self._send(ModelDropped(model))

    def _return_slabs(self) -> None:
        surplus = self.ledger.surplus_slabs(keep=0 if self._asked_slabs else 1)
        if surplus:
            self._send(ReturnSlabs(surplus))

    def _send(self, message: FromInstance) -> None:
        self._flush()
        self._out.append(Send(message))

    def _flush(self) -> None:
        """Memory effects so far go before whatever relies on them."""
        self._out += self.ledger.drain()
