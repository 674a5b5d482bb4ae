"""The prefill core: a queue of groups, one step at a time, KV handed over through the node's host slabs.

`on(event, now_ns) -> effects`; no clock, no I/O. A job goes waiting → running → handed over, or ends with its first
token. What a job will need is reserved before its prefill starts: device blocks for its KV and host blocks to put them
(reserve, acquire, forfeit), so a prefill that has run can always be handed over. A group stays in front until its last
job has run: a request that joins it meanwhile still finds it there, as Algorithm 1 has it.

While one model prefills, the model of the next group is brought in, if there is room that nobody needs more.

Where a policy orders the jobs, long prompts run in pieces: a long one is paused between two of them while a short one
runs. Short ones of a model that wait behind each other share a step (docs/pieces.md).
"""

from __future__ import annotations

from aegis.core.block_runs import count_blocks, first_blocks
from aegis.core.decision import Why
from aegis.core.effects import Effect, Row, Run, Untrack
from aegis.core.estimators import Hardware
from aegis.core.events import InstanceEvent, LoadFailed, Progress, StepFailed, Stepped, Tick
from aegis.core.ids import ONLY_MACHINE, InstanceId, MachineId, ModelId
from aegis.core.messages import (
    AddModel,
    Adopt,
    Broken,
    Cancel,
    CarryImage,
    DropModel,
    DropProxy,
    EvictImage,
    ForgetPeer,
    GaveUp,
    GrantPages,
    GrantSlabs,
    ImageCached,
    KeepKv,
    KvFetched,
    MeetProxy,
    NeedSlabs,
    PeerForgotten,
    PeerReady,
    Ping,
    Prefilled,
    PrefixChecked,
    PromptLogprobs,
    ProxyDropped,
    ReleaseKv,
    ReleaseProxy,
    ReturnSlabs,
    SetSlo,
    Shutdown,
    Started,
    Submit,
    TakeBack,
    Tokens,
    UnloadModel,
)
from aegis.core.model import KvShape
from aegis.core.request import Job, Token
from aegis.core.switching import Switching
from aegis.core.views import PrefillOrder
from memory.effect_list import EffectList
from memory.handed_kv import HandedKv
from memory.instance_models import InstanceModels
from memory.ledger import Ledger
from memory.slab_pool import NoBlocks
from prefill.counters import Counters
from prefill.eviction import Eviction
from prefill.ordering import Ordering
from prefill.prefix_reuse import PrefixReuse
from prefill.queue import Queue, Running
from prefill.reasons import EvictionReasons, next_decision

_HARDWARE = Hardware()


class PrefillCore:
    """One prefill instance."""

    def __init__(
        self,
        instance: InstanceId,
        ledger: Ledger,
        policy: PrefillOrder | None = None,
        hardware: Hardware = _HARDWARE,
        *,
        machine: MachineId = ONLY_MACHINE,
        explains: bool = False,
        reuses: bool = False,
        step_tokens: int | None = None,
    ) -> None:
        """Where it `reuses` KV, a prefill may go on from the last one's. Without a policy groups run as they were made;
        with one, a step has no more than `step_tokens` of prompts.
        `hardware` is what it takes the device for at first. Where it `explains`, a `Decision` is among the effects for
        each job that begins, and for what leaves the device."""
        self.instance = instance
        self.ledger = ledger
        self.counters = Counters()
        self._effects = EffectList(ledger)
        self._models = InstanceModels(ledger, self._effects.send)
        self._explains = explains
        self._queue = Queue()
        self._eviction_reasons = EvictionReasons(instance, self._queue) if explains else None
        self._eviction = Eviction(ledger, self._queue, self.counters, self._eviction_reasons)
        self._ordering = Ordering(policy, hardware, ledger, self._queue, step_tokens)
        self._handed = HandedKv(instance, machine, ledger.host)
        self._prefix_reuse = PrefixReuse(ledger, self.counters, self._effects.send) if reuses else None
        self._switch: Switching | None = None
        self._requested_slabs = False
        self._lacks_slabs = False  # they were refused, and come when there are some

    def on(self, event: InstanceEvent, now_ns: int) -> list[Effect]:
        """Takes one event; returns what to do, in order."""
        if self._eviction_reasons:
            self._eviction_reasons.now_ns = now_ns
        match event:
            case Progress():
                self.ledger.progress(event.stream, event.value)
            case Submit():
                self._submit(event)
            case Stepped():
                self._stepped(event)
            case ReleaseKv():
                self._handed.release(event.request, event.attempt)
            case StepFailed():
                self._step_failed(event)
            case LoadFailed():
                self._load_failed(event)
            case Cancel():
                # what was handed over already is left to `ReleaseKv`: whoever cancels learns of the handle and sends it
                self._queue.cancel(event.request, event.attempt)
            case GrantSlabs():
                self.ledger.grant(event.slabs)
                self._requested_slabs = self._lacks_slabs = event.refused and self._requested_slabs
            case GrantPages() | ImageCached() | EvictImage() | SetSlo() | UnloadModel() | CarryImage() | PeerReady():
                self.ledger.on_message(event)
            case TakeBack():
                self._eviction.give_back(event, now_ns)
            case Tick():
                pass
            case AddModel():
                if self._models.add(event.spec):
                    self._ordering.add(event.spec)
            case DropModel():
                self._models.drop(event.model)
            case ForgetPeer():
                self._effects.send(PeerForgotten(event.peer))  # a prefill instance reads nobody's slabs
            case DropProxy(proxy):
                self._queue.drop(proxy)
                self._effects.send(ProxyDropped(proxy))
            case ReleaseProxy(proxy):
                self._handed.release_all(proxy)
            case PrefixChecked():
                self._prefix_checked(event)
            case Adopt() | KeepKv() | KvFetched() | MeetProxy() | Ping() | Shutdown():
                raise AssertionError(f"not for a prefill instance: {event}")
        begun = self._advance(now_ns)
        self._return_slabs()
        self._effects.flush()
        if begun:
            self._effects.append(self._run(begun))
        return self._effects.take()

    @property
    def active(self) -> ModelId | None:
        """The model that ran last, where its weights are still here."""
        return self._models.active

    @property
    def queued(self) -> int:
        return self._queue.waiting

    @property
    def running(self) -> int:
        return len(self._queue.begun())

    @property
    def handed(self) -> int:
        """Requests whose KV still lies in our host slabs."""
        return len(self._handed)

    def _submit(self, event: Submit) -> None:
        """The sender may not have learned yet that the model was dropped."""
        job, specs = event.job, self.ledger.specs
        if job.model in specs and job.served in specs:
            self._queue.submit(event)
        else:
            self._break(job, f"model '{job.served}' was removed")

    def _advance(self, now_ns: int) -> Running | None:
        """What begins to run, if anything: the step is the last thing an event asks for, all else being under way."""
        if self._prefix_reuse:
            following = self._queue.following()
            self._prefix_reuse.settle(following.jobs if following and not self.ledger.balloon.owes else ())
        if self._models.dropping:
            self._drop_models()
        if self.ledger.unloading:
            self._models.unload(self._in_use())
        if self.ledger.balloon.owes:
            self._eviction.give_way(now_ns, lacks_slabs=self._lacks_slabs)
        self._ordering.arrange(now_ns)
        begun = self._start_next(now_ns) if self._queue.running is None else self._goes_on(self._queue.running)
        if begun:
            self._cut(begun)
            self._join(begun, now_ns)
        self._eviction.prefetch()
        self._ordering.loads(now_ns)
        return begun

    def _start_next(self, now_ns: int) -> Running | None:
        """(1) Bring the model in; (2) reserve device and host blocks; (3) copy what is kept of its prompt, if anything;
        (4) run. What is lacking comes with an event."""
        if self._queue.paused:
            return self._start_beside(self._queue.paused, now_ns)
        if self.ledger.balloon.hopeless:
            self._end_hopeless(now_ns)
        group = self._queue.front()
        if group is None:
            self.ledger.balloon.content()
        if group is None or not self._bring_in(group.jobs[0], now_ns):
            return None
        running = self._reserve(group.jobs[0])
        if running and self._explains:
            why, made_ns = self._ordering.why(running.job, now_ns)
            self._effects.append(next_decision(self.instance, running.job, why, made_ns, now_ns))
        return self._begin(running, now_ns) if running else None

    def _begin(self, running: Running, now_ns: int) -> Running | None:
        """Not at once where something is copied first."""
        job = running.job
        self._queue.running, running.rank_ns = running, self._ordering.rank_ns(job)
        self._queue.take(job)
        self._ordering.begins(job, now_ns)
        self._activate(job.model, now_ns)
        if job.request not in self._queue.suspects:  # it has started before
            self._effects.send(Started(job.request, job.attempt))
        return running if not self._prefix_reuse or self._prefix_reuse.bring(running) else None

    def _start_beside(self, paused: Running, now_ns: int) -> Running | None:
        """A job that overtakes the one that is paused, where there is room for both; else that one goes on."""
        if paused.cancelled:
            self._queue.paused = None
            self._forfeit(paused)
            self._effects.append(Untrack(paused.job.request))
            return self._start_next(now_ns)
        job = self._ordering.overtakes(paused)
        if job and self._fits(job):
            running = self._reserve(job)
            assert running
            if self._explains:
                behind = f"{paused.job.prefill_tokens - paused.start} tokens of {paused.job.model} are still to be run"
                why = Why(
                    f"short enough to come before the next piece of a longer one: {behind}", lost=paused.job.model
                )
                self._effects.append(next_decision(self.instance, job, why, now_ns, now_ns))
            self._changes_to(job.model, now_ns)
            return self._begin(running, now_ns)
        self._changes_to(paused.job.model, now_ns)
        self._activate(paused.job.model, now_ns)
        self._queue.running, self._queue.paused = paused, None
        return paused

    def _fits(self, job: Job) -> bool:
        """Whether there is room for it without anything being made for it, and its adapter is there."""
        if job.adapter is not None and not self.ledger.weights.is_resident(job.adapter):
            return False
        shape = self.ledger.specs[job.model].manifest.kv
        count = shape.blocks_for(job.prefill_tokens)
        return self.ledger.device.room(shape) >= count and self.ledger.host.room(shape) >= _to_host(job, count)

    def _changes_to(self, model: ModelId, now_ns: int) -> None:
        """A model whose weights are there."""
        self._switch = Switching(model, now_ns) if model != self.active else None
        if self._switch:
            self._switch.loaded(now_ns)

    def _prefix_checked(self, event: PrefixChecked) -> None:
        """The job goes on from there, or begins anew."""
        running = self._queue.running
        assert running and (running.job.request, running.job.attempt) == (event.request, event.attempt)
        if running.cancelled:
            self._queue.running = None
            self._forfeit(running)
            return
        assert self._prefix_reuse
        self._prefix_reuse.checked(running, event)

    def _cut(self, begun: Running) -> None:
        """Decides what of the job runs next."""
        alone = self._queue.paused is None  # one that overtakes another runs whole: it is known to be short
        begun.stop = self._ordering.piece_stop(begun.job, begun.start) if alone else begun.job.prefill_tokens

    def _join(self, begun: Running, now_ns: int) -> None:
        """The jobs behind it join its step, in their order, as long as each saves enough of its time, all take no
        longer than a piece and go in one step, and there is room without anything being made for it."""
        first, group = begun.job, self._queue.following()
        whole = begun.stop == first.prefill_tokens and self._queue.paused is None
        if not self._ordering.cuts or not whole or self._is_alone(first) or group is None or group.model != first.model:
            return
        took_ns, most_ns = self._ordering.alone_ns(first), self._ordering.step_ns(first, now_ns)
        tokens, most = begun.stop - begun.start, self._ordering.step_tokens
        for job in list(group.jobs):
            joined_ns = self._ordering.joined_ns(job)
            tokens += job.prefill_tokens
            if most is not None and tokens > most:
                return
            if joined_ns is None or took_ns + joined_ns > most_ns or self._is_alone(job) or not self._fits(job):
                return
            if self._prefix_reuse and self._prefix_reuse.delays(job, [each.job for each in self._queue.begun()]):
                return
            running = self._reserve(job)
            assert running
            took_ns += joined_ns
            if self._explains:
                because = f"in the step of another prompt of {first.model}, which takes less time than one of its own"
                self._effects.append(next_decision(self.instance, job, Why(because), now_ns, now_ns))
            self._queue.take(job)
            self._ordering.begins(job, now_ns)
            self._effects.send(Started(job.request, job.attempt))
            if self._prefix_reuse:
                self._prefix_reuse.bring(running)
            running.stop = job.prefill_tokens
            self._queue.beside.append(running)

    def _is_alone(self, job: Job) -> bool:
        """Whether it runs in a step of its own: its prompt's logprobs are asked for, or a step that it shared has
        failed."""
        return job.sampling.prompt_logprobs is not None or job.request in self._queue.suspects

    def _run(self, begun: Running) -> Run:
        shape = self.ledger.specs[begun.job.model].manifest.kv
        rows = []
        for each in (begun, *self._queue.beside):
            each.learnt = each.start if each.learnt is None else each.learnt
            blocks = first_blocks(each.device, shape.blocks_for(each.stop))
            rows.append(Row(each.job, each.start, each.stop, blocks, len(each.job.sent)))
        return Run(begun.job.model, tuple(rows), 1, 0)

    def _goes_on(self, running: Running) -> Running | None:
        """The job, once it is known what it goes on from."""
        return running if self._prefix_reuse and self._prefix_reuse.may_run_now(running) else None

    def _forfeit(self, running: Running) -> None:
        """Frees what was reserved for it."""
        self._queue.suspects.discard(running.job.request)
        shape = self.ledger.specs[running.job.model].manifest.kv
        self.ledger.device.free(shape, running.device)
        self.ledger.host.free(shape, running.host)

    def _end_hopeless(self, now_ns: int) -> None:
        """Ends the job in front if it never gets the memory it needs, because the instance's limit is too low. The
        others are ordered anew: the reason of the next one would be that of the job that has ended."""
        group = self._queue.front()
        if group:
            self.ledger.balloon.content()
            job = group.jobs[0]
            self._queue.cancel(job.request, job.attempt)
            self._ordering.arrange(now_ns)
            self._break(job, "the memory limit of its instance was lowered below what it needs")

    def _bring_in(self, job: Job, now_ns: int) -> bool:
        weights, model = self.ledger.weights, job.model
        self._models.check_active()
        if self._switch is None or self._switch.model != model:
            self._switch = Switching(model, now_ns) if model != self._models.active else None
        if weights.is_resident(model):
            if self._switch:
                self._switch.loaded(now_ns)
            return job.adapter is None or self._bring_in_adapter(job, job.adapter)
        if not weights.is_loading(model) and self._eviction.load(job, model) and self._switch:
            self._switch.loading_ns = now_ns
        return False

    def _bring_in_adapter(self, job: Job, adapter: ModelId) -> bool:
        """Whether it is there. If not, an event follows."""
        weights = self.ledger.weights
        if weights.is_resident(adapter):
            weights.used(adapter)
            return True
        if not weights.is_loading(adapter):
            self._eviction.load(job, adapter)
        return False

    def _reserve(self, job: Job) -> Running | None:
        shape, device, host = self.ledger.specs[job.model].manifest.kv, self.ledger.device, self.ledger.host
        count = shape.blocks_for(job.prefill_tokens)
        to_host = _to_host(job, count)
        if self._prefix_reuse and device.room(shape) < count:
            self._prefix_reuse.let_go()
        if not self._eviction.make(job, count):
            return None
        if host.room(shape) < to_host:
            self._ask_slabs(shape, to_host)
            return None
        on_device, in_host = device.alloc(shape, count), host.alloc(shape, to_host)
        assert not isinstance(on_device, NoBlocks) and not isinstance(in_host, NoBlocks)
        return Running(job, on_device, in_host)

    def _ask_slabs(self, shape: KvShape, count: int) -> None:
        """An instance that waits holds no idle slabs: instances that keep some would wait for each other for ever."""
        if not self._requested_slabs:
            self._requested_slabs = True
            self._return_slabs()
            short = count - self.ledger.host.room(shape)
            self._effects.send(NeedSlabs(-(-short // self.ledger.host.per_slab(shape))))

    def _activate(self, model: ModelId, now_ns: int) -> None:
        self._eviction.had_step = True
        self.ledger.balloon.content()
        switch, self._switch = self._switch, None
        if switch:
            self._models.active = model
            self.counters.switches += 1
            done = switch.done(now_ns, self.ledger.specs[model])
            self._ordering.switched(done)
            self._effects.send(done)

    def _stepped(self, event: Stepped) -> None:
        stepped = self._queue.ended()
        tokens, made = sum([each.stop - each.start for each in stepped]), 0
        self.counters.prompt_tokens += tokens
        if event.duration_ns:
            pieces = [(each.start if each.learnt is None else each.learnt, each.stop) for each in stepped]
            self._ordering.ran(stepped[0].job.model, event.duration_ns, pieces)
        for running in stepped:
            if event.duration_ns:
                running.learnt = running.stop
            running.prefill_ns += event.duration_ns * (running.stop - running.start) // tokens
            running.start = running.stop
            if running.stop < running.job.prefill_tokens:
                assert self._queue.paused is None
                self._queue.paused = running
            else:
                self._prefilled(running, event.steps[0][made], event)
                made += 1

    def _prefilled(self, running: Running, token: Token, event: Stepped) -> None:
        job = running.job
        shape = self.ledger.specs[job.model].manifest.kv
        self.counters.prefills += 1
        self._queue.suspects.discard(job.request)
        self._effects.append(Untrack(job.request))
        finish = job.finish(len(job.sent), token.id)
        self.ledger.device.commit(shape, running.device)
        if running.cancelled or finish:
            self.ledger.device.free(shape, running.device)
            self.ledger.host.free(shape, running.host)
            if not running.cancelled:
                self._report_prompt(job, event)
                self._effects.send(Tokens(job.request, job.attempt, len(job.sent), (token,), finish))
            return
        self._report_prompt(job, event)
        self._hand_over(running, shape, token)

    def _step_failed(self, event: StepFailed) -> None:
        """Jobs that shared the step run again, each in a step of its own, so that the one at fault fails alone."""
        stepped = self._queue.ended()
        shared = len(stepped) > 1
        for running in reversed(stepped) if shared else stepped:
            self._effects.append(Untrack(running.job.request))
            self._forfeit(running)
            if running.cancelled:
                continue
            if shared:
                self._queue.give_back(running.job)
            else:
                self._break(running.job, event.reason)

    def _load_failed(self, event: LoadFailed) -> None:
        """Requests that wait for the model go on when its image was made again; the next request tries again."""
        self._models.load_failed(event)
        for job in self._queue.drain(event.model):
            self._effects.send(GaveUp(job.request, job.attempt))

    def _break(self, job: Job, reason: str) -> None:
        self._effects.send(Broken(job.request, job.attempt, reason))

    def _report_prompt(self, job: Job, event: Stepped) -> None:
        if event.prompt:
            self._effects.send(PromptLogprobs(job.request, job.attempt, event.prompt))

    def _hand_over(self, running: Running, shape: KvShape, token: Token) -> None:
        job = running.job
        ready = self.ledger.copy_out(shape, running.device, running.host)
        self.ledger.host.commit(shape, running.host)
        self.counters.swap_out_bytes += shape.block_bytes * count_blocks(running.host)
        if self._prefix_reuse:
            self._prefix_reuse.leaves(job, running.device, ready)
        else:
            self.ledger.device.free_after(shape, running.device, ready)
        kv = self._handed.hand(job, shape, running.host, job.prefill_tokens, ready)
        self._effects.send(Prefilled(job.request, job.attempt, token, kv, running.prefill_ns))

    def _drop_models(self) -> None:
        for model in self._models.drop_unused(self._in_use()):
            self._ordering.drop(model)
            self._switch = None if self._switch and self._switch.model == model else self._switch

    def _in_use(self) -> set[ModelId]:
        """Models that a job here is of, and adapters."""
        begun = [running.job for running in self._queue.begun()]
        return self._queue.wanted() | {job.model for job in begun} | {job.served for job in begun}

    def _return_slabs(self) -> None:
        surplus = self.ledger.surplus_slabs(keep=0 if self._requested_slabs else 1)
        if surplus:
            self._effects.send(ReturnSlabs(surplus))


def _to_host(job: Job, count: int) -> int:
    """How many of its blocks are handed over: none if it ends with its first token."""
    return 0 if len(job.sent) + 1 >= job.sampling.max_tokens else count
