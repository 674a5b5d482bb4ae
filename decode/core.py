"""The core of decode and mixed instances: turns of batches of different models (Aegaeon §4.3, Algorithm 2).

`on(event, now_ns) -> effects`; no clock, no I/O. Between any two steps the running batch may be preempted: its KV
stays on the device while there is room and moves to host slabs when there is not. While one batch decodes, the next
turn's model is brought in. Inside a turn batching is continuous: finished requests leave, new ones of the running
model join.

A turn: (1) weights and the KV of its sequences are brought in side by side, unless they are there; (2) a step runs as
soon as the weights and the KV of one sequence are there (rule 1); (3) steps follow until the batch is empty or the
quota is used, where the policy sets one.

A sequence that was adopted has KV to go on from. One that was submitted joins a batch in the same way, and is prefilled
in one of its turns, before the batch's next decode step; its KV is on the device then and stays. Where a turn says
until when nobody needs a step, longer prefills are cut into chunks: between two of them the batch has a step, or
another one its turn, and what is there of the sequence's KV may be put away and brought back like any other.
docs/pieces.md explains these pieces, and the pauses of a turn in which another batch has one run. A device that is
divided has a second lane beside that of the turn (`decode.second_lane`).
"""

from __future__ import annotations

from collections.abc import Iterable

from aegis.core.effects import DivideDevice, Effect, EndRun, Row, Track, Untrack
from aegis.core.estimators import Hardware
from aegis.core.events import InstanceEvent, LoadFailed, Progress, StepFailed, Stepped, Tick
from aegis.core.ids import ONLY_MACHINE, InstanceId, MachineId, ModelId, ProxyId, RequestId, proxy_of
from aegis.core.messages import (
    AddModel,
    Adopt,
    BringIn,
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
    HandOver,
    ImageCached,
    KeepKv,
    KvFetched,
    MeetProxy,
    PeerReady,
    Ping,
    Prefilled,
    PrefixChecked,
    PromptLogprobs,
    ReleaseKv,
    ReleaseProxy,
    ReturnSlabs,
    SetSlo,
    Shutdown,
    Submit,
    TakeBack,
    Tokens,
    UnloadModel,
)
from aegis.core.request import Token
from aegis.core.views import RoundPolicy
from decode.batch_view import BatchViews
from decode.counters import Counters
from decode.eviction import Eviction
from decode.eviction_reasons import EvictionReasons
from decode.hand_overs import HandOvers
from decode.kv_arrivals import Arrivals, unserved
from decode.kv_swap import KvSwap
from decode.lost_peers import LostPeers
from decode.phases import Phases
from decode.prefill_chunks import prompt_rank_ns
from decode.prompt_rows import PromptRows, is_alone, with_a_block
from decode.reasons import TurnReasons
from decode.rotation import Rotation
from decode.second_lane import NO_LANES, LaneOffers, SecondLane
from decode.sequences import DEVICE, Room, Sequence, Stepping, Where, adopted, submitted
from decode.step_times import ChangeTimes, StepTimes
from decode.turn_runs import turn_run
from decode.worklist import Batch, RunningTurn, WorkList
from memory.effect_list import EffectList
from memory.instance_models import InstanceModels
from memory.ledger import Ledger


class DecodeCore:
    """One decode or mixed instance."""

    def __init__(
        self,
        instance: InstanceId,
        ledger: Ledger,
        policy: RoundPolicy,
        hardware: Hardware,
        *,
        machine: MachineId = ONLY_MACHINE,
        explains: bool = False,
        reuses: bool = False,
        lanes: LaneOffers = NO_LANES,
    ) -> None:
        """`lanes` are what the device offers, which a policy of lanes uses. KV on another machine is fetched first.
        Where it `reuses` KV, that of sequences that end is offered to the node. Where it `explains`, there is a
        `Decision` among the effects for each turn that is given, where there was a choice, for what leaves the device,
        and for each request that is given up."""
        self.instance = instance
        self.machine = machine
        self.ledger = ledger
        self.counters = Counters()
        self._reasons = TurnReasons(instance, policy) if explains else None
        self._work = WorkList(policy)
        self._by_request: dict[RequestId, Sequence] = {}
        self._prompts: tuple[Row, ...] = ()  # in the run under way, or about to begin
        self._effects = EffectList(ledger)
        send = self._effects.send
        self._kv = KvSwap(ledger, self.counters, send, reuses=reuses)
        self._arrivals = Arrivals(ledger, self._kv, self.counters, send, self._give_up)
        self._change_times = ChangeTimes()
        self._step_times = StepTimes(hardware, self._change_times)
        self._models = InstanceModels(ledger, send)
        self._views = BatchViews(ledger, self._work, self._models, self._step_times, self._change_times)
        self._phases = Phases(self.counters, self._effects)
        self._lost_peers = LostPeers(self._kv, self._arrivals, send)
        self._eviction_reasons = EvictionReasons(instance, self._work, self._step_times.latency) if explains else None
        self._eviction = Eviction(ledger, self._kv, self._work, self.counters, self._give_up, self._eviction_reasons)
        self.hand_overs = HandOvers(
            instance, machine, ledger, self._kv, self._work, self._eviction, self._phases, send, self._leave
        )
        self._prompt_rows = PromptRows(ledger, self._kv, self._eviction, self._step_times, policy.rules)
        self._rotation = Rotation(ledger, self._kv, self._phases, policy.rules, hardware, self._eviction_reasons)
        self._second = SecondLane(lanes, policy, self._views, self._eviction, self.counters, self._prompt_rows)

    def on(self, event: InstanceEvent, now_ns: int) -> list[Effect]:
        """Takes one event; returns what to do, in order."""
        if self._eviction_reasons:
            self._eviction_reasons.now_ns = now_ns
        match event:
            case Stepped():
                self._stepped(event, now_ns)
            case Progress():
                self.ledger.progress(event.stream, event.value)
                self._kv.progress(event.stream)
            case Adopt():
                self._adopt(event)
            case Submit():
                self._submit(event)
            case StepFailed():
                self._step_failed(event)
            case LoadFailed():
                self._load_failed(event)
            case Cancel():
                self._cancel(event)
            case GrantSlabs() | KeepKv() | PrefixChecked():
                self._kv.on_message(event)
            case KvFetched():
                self._fetched(event)
            case GrantPages() | ImageCached() | EvictImage() | SetSlo() | UnloadModel() | CarryImage() | PeerReady():
                self.ledger.on_message(event)
            case TakeBack():
                self._eviction.give_back(event, now_ns)
            case AddModel():
                if self._models.add(event.spec):
                    self._step_times.add(event.spec)
            case DropModel():
                self._models.drop(event.model)
            case ForgetPeer():
                self._forget(event)
            case DropProxy():
                self._drop_proxy(event.proxy)
            case HandOver():
                self.hand_overs.ask(event, self._by_request.get(event.request))
            case BringIn() | ReleaseKv() | ReleaseProxy():
                self.hand_overs.on_message(event)
            case Tick():
                pass
            case MeetProxy() | Ping() | Shutdown():
                raise AssertionError(f"not for a decode instance: {event}")
        self._append_runs(now_ns, *self._advance(now_ns))
        return self._effects.take()

    def _append_runs(self, now_ns: int, begun: bool, divide: DivideDevice | None, beside: Batch | None) -> None:
        """Puts the runs that begin, or are to end, behind everything else."""
        surplus = self._kv.surplus_slabs()
        if surplus:
            self._effects.send(ReturnSlabs(surplus))
        self._effects.flush()
        if divide:
            self._effects.append(divide)
        if begun:
            until_ns, owes = self._rotation.next_ns(self._work.turn, now_ns), self.ledger.balloon.owes
            self._effects.append(turn_run(self._work, self._prompts, until_ns, owes=owes))
            self._work.under_way = True
        elif self._work.stepping and self._stale(now_ns):
            self._effects.append(EndRun())
        if beside:
            self._effects.append(self._second.run(beside))
        elif self._second.stale():
            self._effects.append(EndRun(1))

    @property
    def active(self) -> ModelId | None:
        """The model that ran last, where its weights are still here."""
        return self._models.active

    @property
    def queued(self) -> int:
        return len(self._by_request) - self.running

    @property
    def running(self) -> int:
        return self._phases.running

    # --- coming and going ---------------------------------------------------------------------------------------------

    def _submit(self, event: Submit) -> None:
        job, spec = event.job, self.ledger.specs.get(event.job.served)
        if spec is None or job.model not in self.ledger.specs:
            self._effects.send(unserved(job))
            return
        sequence = submitted(job, spec)
        if self._work.rules.chunk_tokens is not None:
            sequence.rank_ns = prompt_rank_ns(job, spec.slo, self._step_times.latency[job.model])
        self._join(sequence)

    def _adopt(self, event: Adopt) -> None:
        spec = self.ledger.specs.get(event.job.served)
        if spec is None or event.job.model not in self.ledger.specs:
            self.hand_overs.refuse(event)
            self._effects.send(unserved(event.job))
            return
        sequence = adopted(event, spec, self.machine)
        self.hand_overs.take_back(sequence)
        self._effects.append(Track(event.job, event.tokens))
        self._by_request[sequence.job.request] = sequence
        if sequence.where is Where.ABROAD:
            self._arrivals.expect(sequence)
        else:
            self._join(sequence)

    def _fetched(self, event: KvFetched) -> None:
        sequence = self._arrivals.fetched(event)
        if sequence and event.reason:
            self._give_up(sequence, event.reason)
        elif sequence:
            self._join(sequence)

    def _join(self, sequence: Sequence) -> None:
        self._by_request[sequence.job.request] = sequence
        self._work.join(sequence, self._kv.capacity(sequence.spec))
        self._second.joined(sequence.job.model)

    def _leave(self, sequence: Sequence, *, keep: bool = False) -> None:
        """Whatever state its KV is in; a run may still write to it. `keep`: a later prompt may begin with this KV."""
        del self._by_request[sequence.job.request]
        self._effects.append(Untrack(sequence.job.request))
        self._phases.leave(sequence)
        sequence.dropped = True
        if sequence.where is Where.ABROAD:
            self._arrivals.leave(sequence)
            return
        self._work.leave(sequence)
        if sequence not in self._work.busy:
            self._kv.drop(sequence, keep=keep)

    def _cancel(self, event: Cancel) -> None:
        sequence = self._by_request.get(event.request)
        if sequence and sequence.job.attempt == event.attempt:
            self._leave(sequence, keep=True)

    def _forget(self, event: ForgetPeer) -> None:
        """The peer's process is gone. Requests whose KV had not arrived from it are being prefilled again elsewhere.
        The next process of that name may have handed KV over already, so processes are told apart by their words."""
        for sequence in list(self._by_request.values()):
            if sequence.handle and sequence.handle.is_from(event.peer, event.words):
                self._leave(sequence)
        self._lost_peers.forget(event.peer)

    def _drop_proxy(self, proxy: ProxyId) -> None:
        for sequence in [s for s in self._by_request.values() if proxy_of(s.job.request) == proxy]:
            self._leave(sequence)
        self._lost_peers.drop(proxy)

    # --- steps --------------------------------------------------------------------------------------------------------

    def _stepped(self, event: Stepped, now_ns: int) -> None:
        stepped, prompts = self._ended(event.lane)
        streams = stepped[len(prompts) :]
        self._views.ran(stepped, prompts, event, now_ns)
        if prompts:
            self._prefilled(stepped[: len(prompts)], prompts, streams, event, now_ns)
        if streams:
            self._decoded(streams, event, now_ns, alone=not prompts)

    def _ended(self, lane: int) -> tuple[Stepping, tuple[Row, ...]]:
        """The sequences of the run on the lane, which has ended, and its rows of prompts."""
        if lane:
            return self._second.ended()
        prompts, self._prompts = self._prompts, ()
        return self._work.ended(), prompts

    def _decoded(self, stepped: Stepping, event: Stepped, now_ns: int, *, alone: bool) -> None:
        steps, rows = len(event.steps), len(stepped)
        self.counters.steps += steps
        self.counters.generated_tokens += steps * rows
        self._views.answers.made(stepped[0].job.model, steps * rows)
        if alone and (took := self._second.learn_steps(stepped, event, now_ns)):
            self._effects.send(took)
        turn = self._work.turn
        if turn and not event.lane:
            turn.batch.chunked = False
            if turn.prefills_next and self._work.rules.chunk_tokens is not None:
                self._work.cut()  # the next piece may be as long as the streams allow now
        for row, sequence in enumerate(stepped, len(event.steps[-1]) - rows):
            token = event.steps[-1][row]
            if sequence.dropped:
                self._kv.drop(sequence, keep=True)
                continue
            sequence.cached += steps
            sequence.generated += steps
            sequence.last = token.id
            sequence.last_ns = now_ns
            if self._kv.reuses:
                sequence.made += [made[row].id for made in event.steps]
            if sequence.job.sampling.finish(sequence.generated - 1, token.id):
                self._views.answers.ended(sequence.job.model)
                self._leave(sequence, keep=True)

    def _prefilled(
        self, stepped: Stepping, rows: tuple[Row, ...], streams: Stepping, event: Stepped, now_ns: int
    ) -> None:
        """Each prompt had a share of the step's time, by its tokens."""
        self._second.learn_prompts(stepped, rows, streams, event)
        tokens, made = sum([row.stop - row.start for row in rows]), 0
        for sequence, row in zip(stepped, rows, strict=True):
            self.counters.prefills += row.samples
            self.counters.prompt_tokens += row.stop - row.start
            sequence.prefill_ns += event.duration_ns * (row.stop - row.start) // tokens
            token = event.steps[0][made] if row.samples else None
            made += row.samples
            if sequence.dropped:
                self._kv.drop(sequence, keep=True)
            elif token is not None:
                sequence.last_ns = now_ns
                self._first_token(sequence, token, event.prompt)
        turn = self._work.turn
        if not event.lane and (not rows[0].samples or (turn and turn.free_until_ns is not None)):
            self._work.cut()  # the next prompts may take as long again

    def _first_token(self, sequence: Sequence, token: Token, prompt: tuple[Token, ...]) -> None:
        job = sequence.job
        sequence.generated += 1
        sequence.last = token.id
        sequence.made.append(token.id)
        if prompt:
            self._effects.send(PromptLogprobs(job.request, job.attempt, prompt))
        finish = job.finish(sequence.generated - 1, token.id)
        if finish:
            self._effects.send(Tokens(job.request, job.attempt, sequence.generated - 1, (token,), finish))
            self._leave(sequence, keep=True)
        else:
            self._effects.send(Prefilled(job.request, job.attempt, token, None, sequence.prefill_ns))

    def _step_failed(self, event: StepFailed) -> None:
        stepped, rows = self._ended(event.lane)
        shared = bool(rows) and len(stepped) > 1
        for sequence in stepped:
            if sequence.dropped:
                self._kv.drop(sequence)
            elif not shared:
                self._break(sequence, event.reason)
        if shared:
            self._run_apart(stepped, rows)

    def _run_apart(self, stepped: Stepping, rows: tuple[Row, ...]) -> None:
        """A step of prompts and others has failed and has made nothing. Each prompt is run again, in steps of its own,
        so that the one at fault fails alone."""
        for sequence, row in zip(stepped, rows, strict=False):
            if not sequence.dropped:
                sequence.suspect, sequence.lacks = True, sequence.cached - row.start
                self._work.waits_again(sequence, was_all=row.samples)

    def _break(self, sequence: Sequence, reason: str) -> None:
        self._effects.send(Broken(sequence.job.request, sequence.job.attempt, reason))
        self._leave(sequence)

    def _load_failed(self, event: LoadFailed) -> None:
        """Requests that wait for the model go on when its image was made again; the next request tries again."""
        self._models.load_failed(event)
        self.hand_overs.load_failed(event.model)
        for sequence in [s for s in self._by_request.values() if event.model in (s.job.model, s.job.adapter)]:
            self._leave(sequence)
            self._effects.send(GaveUp(sequence.job.request, sequence.job.attempt))

    def _give_up(self, sequence: Sequence, because: str) -> None:
        self.counters.given_up += 1
        if self._eviction_reasons:
            self._effects.append(self._eviction_reasons.gave_up(sequence, because))
        self._leave(sequence)
        self._effects.send(GaveUp(sequence.job.request, sequence.job.attempt))

    def _advance(self, now_ns: int) -> tuple[bool, DivideDevice | None, Batch | None]:
        """Whether a run begins on the first lane, how the device is to be divided first, and the batch whose run begins
        on the second lane. Runs come last, when all else that the event asks for is under way."""
        if self._arrivals:
            self._arrivals.advance(idle=not self._work.batches)
        if self._lost_peers:
            self._lost_peers.answer()
        if self.hand_overs:
            self.hand_overs.advance()
        if self._models.dropping:
            self._drop_models()
        if self.ledger.unloading:
            self._models.unload(self._in_use())
        if self.ledger.balloon.owes and self._eviction.give_way(now_ns):
            self._end_turn()
            self.ledger.balloon.settle(now_ns)
        if not self._work.busy:
            self._kv.compact(self._by_request.values())
        self._eviction.abandon_unwanted()
        if (awaited := self._work.awaited) and not self.ledger.weights.is_loading(awaited):
            self._work.end_wait()
        turn = self._work.turn
        if self._work.stepping and turn and not turn.pause:  # who comes meanwhile need not wait for the end of the run
            self._eviction.bring_in(turn.batch)
        begun = not self._work.stepping and self._find_step(now_ns)
        divide, beside = self._second.fill(now_ns, begins=begun)
        if beside:
            self._phases.begin(self._work.beside, self._second.prompts)
        if self._second.left:
            self._phases.stop(self._second.forget_left())
        if self._work.stepping and self._work.rules.prefetches:
            self._eviction.prefetch()
        if self.hand_overs:
            self.hand_overs.bring_in()
        if not self.ledger.balloon.owes:
            self._eviction.grow_ahead(self._work.stepping if begun else ())
            self._eviction.grow_ahead(self._work.beside if beside else ())
        return begun, divide, beside

    def _find_step(self, now_ns: int) -> bool:
        """Goes on with the turn, or from turn to turn, until a step can begin or something has to be waited for."""
        while not self._work.stepping:
            turn = self._turn_now(now_ns)
            if turn is None or not self._try(turn, now_ns):
                break
        return bool(self._work.stepping)

    def _turn_now(self, now_ns: int) -> RunningTurn | None:
        previous, holder = self._work.turn, self._work.holder
        turn = self._work.turn_now(now_ns, lambda batch: self._views.of(batch, now_ns), self._kv.capacity)
        if turn is None:
            self._change_times.idle()
            self.ledger.balloon.content()
            if self.ledger.balloon.owes:
                self._eviction.give_way(now_ns)
        elif self._reasons and turn is not previous and self._work.had_choice(previous):
            jobs = [sequence.job for sequence in turn.batch.sequences]
            self._effects.append(self._reasons.decision(self._work.plan, self._work.given(), jobs, now_ns))
        for batch in (previous.batch if previous else None, holder):
            if batch and turn and batch is not turn.batch and batch is not self._work.holder:
                self._preempt(batch)
        return turn

    def _preempt(self, batch: Batch) -> None:
        self._phases.stop(batch.sequences)
        if not self._work.rules.keeps_kv:
            for sequence in [s for s in batch.sequences if s.where is not Where.NOWHERE]:
                self._give_up(sequence, "its turn is over, and no KV is kept over a switch")

    def _end_turn(self) -> None:
        """Before its time, for another instance."""
        turn, holder = self._work.turn, self._work.holder
        assert turn is not None and holder is not None
        self._work.end_turn()
        for batch in (turn.batch, holder) if turn.batch is not holder else (holder,):
            self._preempt(batch)
            self._eviction.leave(batch)

    def _try(self, turn: RunningTurn, now_ns: int) -> bool:
        """Does what the turn needs next: weights and KV arrive side by side. True when memory was freed at once, so
        that there is more to do now."""
        model, weights = turn.batch.model, self.ledger.weights
        self._models.check_active()
        if turn.pause:
            return self._try_pause(turn, now_ns)
        if not weights.is_resident(model) and not weights.is_loading(model):
            if not self._eviction.load(model):
                return self._stuck(turn)
            turn.loads(now_ns)
        if self._rotation.rotate(turn, now_ns):
            return False
        ready = [s for s in self._there(turn.batch) if self._eviction.grow(s)]
        # who decodes has to wait in turns that do not: else what is to be prefilled would be refused its room for ever
        self._eviction.bring_in(turn.batch, decodes=turn.decodes)
        if weights.is_loading(model):
            return self._work.wait_for_weights(turn)
        turn.loaded(now_ns)
        step_due = ready and turn.decodes and (self._second.takes(turn.batch, ready, now_ns) or turn.batch.chunked)
        free = not step_due and not self._work.beside
        prefills = turn.prefills_next and (free or self._second.lets_in(turn.batch, ready))
        if prefills and self._begin_prefill(turn, now_ns, ready):
            return False
        if ready and turn.decodes:
            self._begin_decode(turn, ready, now_ns)
            return False
        waits = self.ledger.transfers.in_flight or self._kv.checking or self._work.beside
        return not waits and self._stuck(turn)

    def _there(self, batch: Batch) -> list[Sequence]:
        """The sequences of the batch that the first lane can decode now."""
        here = [s for s in batch.sequences if s.where is DEVICE and not s.lacks and not s.beside and not s.leaving]
        return [s for s in here if self._eviction.adapters.there(s)] if self.ledger.adapters else here

    def _try_pause(self, turn: RunningTurn, now_ns: int) -> bool:
        """A pause takes what is there: for it nothing is brought in, and nothing leaves."""
        batch, fits = turn.batch, False
        if self.ledger.weights.is_resident(batch.model):
            turn.loaded(now_ns)
            fits = turn.prefills_next and self._eviction.fits(batch.next_waiting())
            if fits and not self._work.beside and self._begin_prefill(turn, now_ns, ()):
                return False
            ready = [s for s in self._there(batch) if self._eviction.fits(s) and self._eviction.grow(s)]
            if ready and turn.decodes:
                self._second.takes(batch, ready, now_ns)  # the prompt that they interrupt may go on beside them
                self._begin_decode(turn, ready, now_ns)
                return False
        self._work.give_up_pause(now_ns, now_ns + self.ledger.specs[batch.model].slo.gap_ns, fits=fits)
        return True

    def _stuck(self, turn: RunningTurn) -> bool:
        """True when room was made at once. What never gets any, its instance's limit being too low, ends."""
        if self.ledger.balloon.hopeless:
            self.ledger.balloon.content()
            self._break(turn.batch.sequences[-1], "the memory limit of its instance was lowered below what it needs")
            return True
        return self._eviction.clear(turn) is Room.NOW

    def _begin_prefill(self, turn: RunningTurn, now_ns: int, ready: Iterable[Sequence]) -> bool:
        """Begins the prefill of the batch's next sequence, or a chunk of it, if there is room for all of it and its KV
        is not away. Other prompts may join, and those `ready` to decode: that takes less than a step of their own, and
        their tokens come no later. After a prompt that runs alone they have a step, however many more of these wait."""
        batch, sequence = turn.batch, turn.batch.next_waiting()
        if sequence.where not in (Where.NOWHERE, Where.DEVICE) or not self._eviction.grow(sequence):
            return False
        prompts, rows = self._prompt_rows.of(turn, sequence, self._by_request.values(), now_ns, self._work.beside)
        there = with_a_block(ready) if turn.decodes and self._work.rules.chunk_tokens is not None else []
        streams = [] if is_alone(sequence) else there
        self._prompts = tuple(rows)
        for each, row in zip(prompts, rows, strict=True):
            each.where, each.lacks = Where.DEVICE, each.cached - row.stop
            batch.waiting -= row.samples
        batch.chunked = not streams and (not rows[-1].samples or bool(there))
        self._begin_step(turn, (*prompts, *streams), now_ns)
        self._phases.begin(self._work.stepping, self._prompts)
        return True

    def _begin_decode(self, turn: RunningTurn, ready: list[Sequence], now_ns: int) -> None:
        self._begin_step(turn, tuple(ready), now_ns)
        self._phases.run(ready)

    def _begin_step(self, turn: RunningTurn, stepping: Stepping, now_ns: int) -> None:
        self._work.begins(turn, stepping, now_ns)
        changes = turn.batch.model != self._models.active
        self._change_times.begins(turn.batch.batch, now_ns, changes=changes, pause=turn.pause)
        if changes:
            self._switched(turn, now_ns)
        self._work.stepping = stepping
        self.ledger.balloon.content()

    def _switched(self, turn: RunningTurn, now_ns: int) -> None:
        """A load beside running steps is not measured: its end is only noticed between two of them."""
        model = self._models.active = turn.batch.model
        self.ledger.weights.used(model)
        self.counters.switches += 1
        done = turn.switching.done(now_ns, self.ledger.specs[model], self._change_times.work_share)
        if not done.prefetched:
            self._step_times.latency[model].saw_switch(done.copy_ns)
        self._effects.send(done)

    def _stale(self, now_ns: int) -> bool:
        """Whether the run under way should make no further step: it would have other rows, or something else comes
        first."""
        turn = self._work.turn
        assert turn is not None
        there = self._there(turn.batch)
        if turn.prefills_next and (not self._work.beside or self._second.lets_in(turn.batch, there)):
            return True
        changed = tuple(there) != self._work.stepping or self._second.wants_end
        return changed or self._work.outdated(now_ns) or self.ledger.balloon.owes

    def _drop_models(self) -> None:
        self._kv.give_up_offers()
        for model in self._models.drop_unused(self._in_use()):
            self._step_times.forget(model)
            self._views.answers.forget(model)
            self._second.forget(model)

    def _in_use(self) -> set[ModelId]:
        """Models that a request here is of, and adapters."""
        return self._eviction.in_use() | self._arrivals.models()
