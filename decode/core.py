"""The decode core: rounds of turns over batches of different models (Aegaeon §4.3, Algorithm 2).

`on(event, now_ns) -> effects`; no clock, no I/O. Between any two steps the running batch may be preempted: its KV
stays on the device while there is room and moves to host slabs when there is not. While one batch decodes, the next
turn's model is brought in. Inside a turn batching is continuous: finished requests leave, new ones of the running
model join.

A turn: (1) the model's weights and the KV of its sequences are brought in side by side, unless they are there; (2) a
step runs as soon as the weights and the KV of one sequence are there (rule 1); (3) steps follow until the quota is
used, the batch is empty or, with nothing else to run, for ever.
"""

from __future__ import annotations

from aegis.core.effects import DecodeRow, Effect, RunDecode, Send, StreamName, Track, Untrack
from aegis.core.estimators import Hardware, Latency
from aegis.core.events import InstanceEvent, LoadFailed, Progress, StepFailed, Stepped, Tick
from aegis.core.ids import InstanceId, ModelId, RequestId
from aegis.core.messages import (
    AddModel,
    Adopt,
    Broken,
    Cancel,
    DropModel,
    EvictImage,
    ForgetPeer,
    FromInstance,
    GaveUp,
    GrantPages,
    GrantSlabs,
    ImageCached,
    ImageUnreadable,
    ModelAdded,
    ModelDropped,
    ModelFailed,
    PeerForgotten,
    Phase,
    ReleaseKv,
    ReturnSlabs,
    Shutdown,
    Submit,
    TakeBack,
    Tokens,
)
from aegis.core.views import BatchView, RoundPolicy
from decode.room import RoomMaker
from decode.sequences import Counters, KvStore, Room, Sequence, Where
from decode.worklist import Batch, RunningTurn, WorkList
from memory.ledger import Ledger


class DecodeCore:
    """One decode instance."""

    def __init__(self, instance: InstanceId, ledger: Ledger, policy: RoundPolicy, hardware: Hardware) -> None:
        self.instance = instance
        self.ledger = ledger
        self.active: ModelId | None = None
        self.counters = Counters()
        self._hardware = hardware
        self._latency: dict[ModelId, Latency] = {}
        self._work = WorkList(policy)
        self._by_request: dict[RequestId, Sequence] = {}
        self._dropping: set[ModelId] = set()
        self._forgetting: list[InstanceId] = []  # one entry per question
        self._out: list[Effect] = []
        self._kv = KvStore(ledger, self.counters, self._send)
        self._room = RoomMaker(ledger, self._kv, self._work, self.counters, self._give_up)

    def on(self, event: InstanceEvent, now_ns: int) -> list[Effect]:
        """Takes one event; returns what to do, in order."""
        match event:
            case Adopt():
                self._adopt(event)
            case Stepped():
                self._stepped(event)
            case StepFailed():
                self._step_failed(event)
            case Progress():
                self._progress(event)
            case LoadFailed():
                self._load_failed(event)
            case Cancel():
                self._cancel(event)
            case GrantSlabs():
                self._kv.granted(event)
            case GrantPages() | ImageCached() | EvictImage():
                self.ledger.told(event)
            case TakeBack():
                self._take_back(event, now_ns)
            case Tick():
                pass
            case AddModel():
                self._add_model(event)
            case DropModel():
                self._drop_model(event.model)
            case ForgetPeer():
                self._forget(event.peer)
            case Submit() | ReleaseKv() | Shutdown():
                raise AssertionError(f"not for a decode instance: {event}")
        begun = self._advance(now_ns)
        surplus = self._kv.surplus_slabs()
        if surplus:
            self._send(ReturnSlabs(surplus))
        self._flush()
        if begun:
            self._out.append(self._step())
        out, self._out = self._out, []
        return out

    @property
    def queued(self) -> int:
        return len(self._by_request) - self.running

    @property
    def running(self) -> int:
        return sum(sequence.running for sequence in self._by_request.values())

    # --- coming and going -----------------------------------------------------------------------------------------

    def _adopt(self, event: Adopt) -> None:
        spec = self.ledger.specs[event.job.model]
        sequence = Sequence(event.job, list(event.tokens), event.kv.tokens, spec, event.kv)
        self._by_request[event.job.request] = sequence
        self._out.append(Track(event.job, event.tokens))
        self._work.join(sequence, self._kv.capacity(spec))

    def _leave(self, sequence: Sequence) -> None:
        """Ends a sequence here, whatever state its KV is in. A step in flight still writes to its blocks."""
        del self._by_request[sequence.job.request]
        self._work.leave(sequence)
        self._out.append(Untrack(sequence.job.request))
        sequence.gone = True
        if sequence not in self._work.stepping:
            self._kv.drop(sequence)

    def _cancel(self, event: Cancel) -> None:
        sequence = self._by_request.get(event.request)
        if sequence and sequence.job.attempt == event.attempt:
            self._leave(sequence)

    def _forget(self, peer: InstanceId) -> None:
        """The peer's process is gone. What had not arrived from it is being prefilled again by others."""
        for sequence in [s for s in self._by_request.values() if s.handle and s.handle.owner == peer]:
            self._leave(sequence)
        self._forgetting.append(peer)

    # --- steps ------------------------------------------------------------------------------------------------------

    def _stepped(self, event: Stepped) -> None:
        stepped, self._work.stepping = self._work.stepping, ()
        assert len(stepped) == len(event.tokens)
        self.counters.steps += 1
        self.counters.generated_tokens += len(stepped)
        latency = self._latency[stepped[0].job.model]
        latency.saw_decode(sum(s.cached for s in stepped), event.duration_ns)
        for sequence, token in zip(stepped, event.tokens, strict=True):
            if sequence.gone:
                self._kv.drop(sequence)
                continue
            job, index = sequence.job, len(sequence.tokens)
            sequence.cached += 1
            sequence.tokens.append(token.id)
            finish = job.finish(index, token.id)
            self._send(Tokens(job.request, job.attempt, index, (token,), finish))
            if finish:
                self._leave(sequence)

    def _step_failed(self, event: StepFailed) -> None:
        stepped, self._work.stepping = self._work.stepping, ()
        for sequence in stepped:
            if sequence.gone:
                self._kv.drop(sequence)
                continue
            self._break(sequence, event.reason)

    def _break(self, sequence: Sequence, reason: str) -> None:
        self._send(Broken(sequence.job.request, sequence.job.attempt, reason))
        self._leave(sequence)

    def _load_failed(self, event: LoadFailed) -> None:
        """Whoever waits for the model is told; the next request tries again."""
        self.ledger.weights.abandon(event.model)
        self._send(ImageUnreadable(event.model, event.reason))
        for sequence in [s for s in self._by_request.values() if s.job.model == event.model]:
            self._break(sequence, event.reason)

    def _give_up(self, sequence: Sequence) -> None:
        self._leave(sequence)
        self._send(GaveUp(sequence.job.request, sequence.job.attempt))

    def _take_back(self, event: TakeBack, now_ns: int) -> None:
        if event.gentle:
            self._room.trim(event, now_ns)
        else:
            self.ledger.balloon.take_back(event, now_ns)

    def _progress(self, event: Progress) -> None:
        self.ledger.progress(event.stream, event.value)
        if event.stream is StreamName.SWAP_IN:
            for sequence in self._by_request.values():
                self._kv.settle(sequence)
            self._kv.release_departed()

    def _advance(self, now_ns: int) -> bool:
        """Whether a step begins: it is the last thing this event asks for, with everything else under way."""
        self._answer_peers()
        self._drop_models()
        if self.ledger.balloon.owes and self._room.give_way(now_ns):
            self._end_turn()
            self.ledger.balloon.settle(now_ns)
        if not self._work.stepping:
            self._kv.compact(self._by_request.values())
        begun = not self._work.stepping and self._find_step(now_ns)
        if self._work.stepping:
            self._room.prefetch()
        return begun

    def _find_step(self, now_ns: int) -> bool:
        """Goes on with the turn, or from turn to turn, until a step can begin or something has to be waited for."""
        again = True
        while again and not self._work.stepping:
            turn = self._turn_now(now_ns)
            again = turn is not None and self._try(turn, now_ns)
        return bool(self._work.stepping)

    def _turn_now(self, now_ns: int) -> RunningTurn | None:
        previous = self._work.turn
        turn = self._work.turn_now(now_ns, self._view)
        if turn is None:
            self.ledger.balloon.content()
        if previous and turn and previous.batch is not turn.batch:
            self._preempt(previous.batch)
        return turn

    def _preempt(self, batch: Batch) -> None:
        stopped = [s for s in batch.sequences if s.running]
        for sequence in stopped:
            sequence.running = False
        self.counters.preemptions += len(stopped)
        if stopped:
            self._send(Phase(tuple(s.job.request for s in stopped), running=False))

    def _view(self, batch: Batch) -> BatchView:
        latency, slo = self._latency[batch.model], self.ledger.specs[batch.model].slo
        step_ns = latency.decode_ns(sum(s.cached for s in batch.sequences))
        return BatchView(batch.batch, batch.model, step_ns, slo.tbt_ns, latency.switch_ns())

    def _end_turn(self) -> None:
        """Before its time, for another instance."""
        turn = self._work.turn
        assert turn is not None
        self._preempt(turn.batch)
        self._work.turn = None
        self._room.leave(turn.batch)

    def _try(self, turn: RunningTurn, now_ns: int) -> bool:
        """Does what the turn needs next: weights and KV arrive side by side. True when memory was freed at once on the
        way: look again."""
        model, weights = turn.batch.model, self.ledger.weights
        if self.active is not None and not weights.is_resident(self.active):
            self.active = None
        if not weights.is_resident(model) and not weights.is_loading(model):
            if not self._room.load(model):
                return self._stuck(turn.batch)
            turn.switching.loading_ns = now_ns
        ready = [s for s in turn.batch.sequences if s.where is Where.DEVICE and self._room.grow(s)]
        self._room.bring_in(turn.batch, len(ready))
        if weights.is_loading(model):
            return False
        turn.switching.loaded(now_ns)
        if ready:
            self._begin_step(turn, ready, now_ns)
            return False
        return not self.ledger.transfers.in_flight and self._stuck(turn.batch)

    def _stuck(self, batch: Batch) -> bool:
        """True when room was made at once. What never gets any, its instance's limit being too low, ends."""
        if self.ledger.balloon.hopeless:
            self.ledger.balloon.content()
            self._break(batch.sequences[-1], "the memory limit of its instance was lowered below what it needs")
            return True
        return self._room.clear(batch) is Room.NOW

    def _begin_step(self, turn: RunningTurn, ready: list[Sequence], now_ns: int) -> None:
        if turn.started_ns is None:
            turn.started_ns = now_ns
        if turn.batch.model != self.active:
            self._switched(turn, now_ns)
        resumed = [s for s in ready if not s.running]
        if resumed:
            for sequence in resumed:
                sequence.running = True
            self._send(Phase(tuple(s.job.request for s in resumed), running=True))
        self._work.stepping = tuple(ready)
        self.ledger.balloon.content()

    def _switched(self, turn: RunningTurn, now_ns: int) -> None:
        """A load beside running steps is not measured: its end is only noticed between two of them."""
        self.active = turn.batch.model
        self.counters.switches += 1
        done = turn.switching.done(now_ns, nbytes=self.ledger.specs[self.active].manifest.image_bytes)
        if not done.prefetched:
            self._latency[self.active].saw_switch(done.copy_ns)
        self._send(done)

    def _step(self) -> RunDecode:
        rows = tuple(DecodeRow(s.job.request, s.tokens[-1], s.cached, s.device) for s in self._work.stepping)
        return RunDecode(self._work.stepping[0].job.model, rows)

    # --- models, peers, messages --------------------------------------------------------------------------------------

    def _add_model(self, event: AddModel) -> None:
        spec = event.spec
        if not self.ledger.add_model(spec):
            self._send(ModelFailed(spec.model, "no address space is left"))
            return
        self._latency[spec.model] = Latency(spec.manifest, self._hardware)
        self._send(ModelAdded(spec.model))

    def _drop_model(self, model: ModelId) -> None:
        if model in self.ledger.specs:
            self._dropping.add(model)
        else:
            self._send(ModelDropped(model))  # it could not be added

    def _drop_models(self) -> None:
        in_use = {s.job.model for s in self._work.stepping} | {b.model for b in self._work.batches}
        for model in sorted(self._dropping - in_use):
            if self.ledger.weights.is_loading(model):
                continue
            self.ledger.drop_model(model)
            self._dropping.remove(model)
            del self._latency[model]
            self.active = None if self.active == model else self.active
            self._send(ModelDropped(model))

    def _answer_peers(self) -> None:
        done = [peer for peer in self._forgetting if not self._kv.reads_from(peer)]
        self._forgetting = [peer for peer in self._forgetting if peer not in done]
        for peer in done:
            self._send(PeerForgotten(peer))

    def _send(self, message: FromInstance) -> None:
        self._flush()
        self._out.append(Send(message))

    def _flush(self) -> None:
        """Memory effects so far go before whatever relies on them."""
        self._out += self.ledger.drain()
