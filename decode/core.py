"""The decode core: rounds of turns over batches of different models (Aegaeon §4.3, Algorithm 2).

`on(event, now_ns) -> effects`; no clock, no I/O. Between any two steps the running batch may be preempted: its KV
stays on the device while there is room and moves to host slabs when there is not. While one batch decodes, the next
turn's model is brought in. Inside a turn batching is continuous: finished requests leave, new ones of the running
model join.

A turn: (1) the model's weights become resident; (2) KV of its sequences is brought in, and a step runs as soon as one
is there (rule 1); (3) steps until the quota is used, the batch is empty or, with nothing else to run, for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from aegis.core.effects import DecodeRow, Effect, RunDecode, Send, StreamName, Track, Untrack
from aegis.core.estimators import Hardware, Latency
from aegis.core.events import InstanceEvent, Progress, Stepped
from aegis.core.ids import InstanceId, ModelId, RequestId
from aegis.core.messages import (
    AddModel,
    Adopt,
    Cancel,
    DropModel,
    ForgetPeer,
    FromInstance,
    GrantSlabs,
    ModelAdded,
    ModelDropped,
    ModelFailed,
    PeerForgotten,
    Phase,
    ReleaseKv,
    ReturnSlabs,
    Shutdown,
    Submit,
    SwitchDone,
    Tokens,
)
from aegis.core.views import BatchView, RoundPolicy, Turn
from decode.sequences import Counters, KvStore, Sequence, Where
from memory.ledger import Ledger
from memory.pages import NoPages

MAX_BATCH = 64
LOOKAHEAD_BLOCKS = 4  # room for growth a sequence is counted with when it joins a batch (Aegaeon's artifact)


@dataclass(slots=True)
class _Batch:
    batch: int
    model: ModelId
    sequences: list[Sequence]


@dataclass(slots=True)
class _Turn:
    """`started_ns` is that of its first step: time spent bringing things in is not taken from the quota."""

    batch: _Batch
    quota_ns: int
    wanted_ns: int
    loading_ns: int | None = None
    loaded_ns: int | None = None
    started_ns: int | None = None


class DecodeCore:
    """One decode instance."""

    def __init__(self, instance: InstanceId, ledger: Ledger, policy: RoundPolicy, hardware: Hardware) -> None:
        self.instance = instance
        self.ledger = ledger
        self.active: ModelId | None = None
        self.counters = Counters()
        self._policy = policy
        self._hardware = hardware
        self._latency: dict[ModelId, Latency] = {}
        self._loading_since: dict[ModelId, int] = {}
        self._batches: list[_Batch] = []  # the work list
        self._next_batch = 0
        self._round: deque[Turn] = deque()
        self._turn: _Turn | None = None
        self._stepping: tuple[Sequence, ...] = ()
        self._by_request: dict[RequestId, Sequence] = {}
        self._dropping: set[ModelId] = set()
        self._forgetting: set[InstanceId] = set()
        self._out: list[Effect] = []
        self._kv = KvStore(ledger, self.counters, self._send)

    def on(self, event: InstanceEvent, now_ns: int) -> list[Effect]:
        """Takes one event; returns what to do, in order."""
        match event:
            case Adopt():
                self._adopt(event)
            case Stepped():
                self._stepped(event)
            case Progress():
                self._progress(event, now_ns)
            case Cancel():
                self._cancel(event)
            case GrantSlabs():
                self._kv.granted(event)
            case AddModel():
                self._add_model(event)
            case DropModel():
                self._dropping.add(event.model)
            case ForgetPeer():
                self._forget(event.peer)
            case Submit() | ReleaseKv() | Shutdown():
                raise AssertionError(f"not for a decode instance: {event}")
        self._advance(now_ns)
        surplus = self._kv.surplus_slabs(idle=not self._by_request)
        if surplus:
            self._send(ReturnSlabs(surplus))
        self._flush()
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
        self._batch_for(sequence).sequences.append(sequence)

    def _batch_for(self, sequence: Sequence) -> _Batch:
        """(1) A batch of the same model with room; (2) a new one at the end of the work list."""
        need, model = sequence.blocks_ahead(LOOKAHEAD_BLOCKS), sequence.job.model
        for batch in self._batches:
            if batch.model == model and len(batch.sequences) < MAX_BATCH:
                taken = sum(s.blocks_ahead(LOOKAHEAD_BLOCKS) for s in batch.sequences)
                if taken + need <= self._kv.capacity(sequence.spec):
                    return batch
        self._next_batch += 1
        self._batches.append(_Batch(self._next_batch, model, []))
        return self._batches[-1]

    def _leave(self, sequence: Sequence) -> None:
        """Ends a sequence here, whatever state its KV is in. A step in flight still writes to its blocks."""
        del self._by_request[sequence.job.request]
        batch = next(b for b in self._batches if sequence in b.sequences)
        batch.sequences.remove(sequence)
        if not batch.sequences:
            self._batches.remove(batch)
        self._out.append(Untrack(sequence.job.request))
        sequence.gone = True
        if sequence not in self._stepping:
            self._kv.drop(sequence)

    def _cancel(self, event: Cancel) -> None:
        sequence = self._by_request.get(event.request)
        if sequence and sequence.job.attempt == event.attempt:
            self._leave(sequence)

    def _forget(self, peer: InstanceId) -> None:
        """The peer's process is gone. What had not arrived from it is being prefilled again by others."""
        for sequence in [s for s in self._by_request.values() if s.handle and s.handle.owner == peer]:
            self._leave(sequence)
        self._forgetting.add(peer)

    # --- steps ------------------------------------------------------------------------------------------------------

    def _stepped(self, event: Stepped) -> None:
        stepped, self._stepping = self._stepping, ()
        assert len(stepped) == len(event.tokens)
        self.counters.steps += 1
        self.counters.generated_tokens += len(stepped)
        latency = self._latency.get(stepped[0].job.model)
        if latency:
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

    def _progress(self, event: Progress, now_ns: int) -> None:
        for model in self.ledger.progress(event.stream, event.value):
            self._latency[model].saw_switch(now_ns - self._loading_since.pop(model))
        if event.stream is StreamName.SWAP_IN:
            for sequence in self._by_request.values():
                self._kv.settle(sequence)
            self._kv.release_departed()

    def _advance(self, now_ns: int) -> None:
        self._answer_peers()
        self._drop_models()
        if not self._stepping:
            while self._turn_now(now_ns) and not self._run(now_ns):
                pass
        if self._stepping:
            self._prepare_next(now_ns)

    def _turn_now(self, now_ns: int) -> _Turn | None:
        """The turn that goes on or begins; None when there is no work."""
        turn = self._turn
        if turn and turn.batch.sequences and not self._used_up(turn, now_ns):
            return turn
        by_id = {batch.batch: batch for batch in self._batches}
        if not by_id:
            self._turn = None
            self._round.clear()
            return None
        while True:
            if not self._round:
                self._round.extend(self._policy.plan(self._views()))
            planned = self._round.popleft()
            if planned.batch in by_id:
                break
        self._begin(by_id[planned.batch], planned.quota_ns, now_ns)
        return self._turn

    def _used_up(self, turn: _Turn, now_ns: int) -> bool:
        return turn.started_ns is not None and now_ns - turn.started_ns >= turn.quota_ns

    def _begin(self, batch: _Batch, quota_ns: int, now_ns: int) -> None:
        previous = self._turn
        self._turn = _Turn(batch, quota_ns, now_ns)
        if previous and previous.batch is not batch:
            stopped = [s for s in previous.batch.sequences if s.running]
            for sequence in stopped:
                sequence.running = False
            self.counters.preemptions += len(stopped)
            if stopped:
                self._send(Phase(tuple(s.job.request for s in stopped), running=False))

    def _views(self) -> list[BatchView]:
        views = []
        for batch in self._batches:
            latency, slo = self._latency[batch.model], self.ledger.specs[batch.model].slo
            step_ns = latency.decode_ns(sum(s.cached for s in batch.sequences))
            views.append(BatchView(batch.batch, batch.model, step_ns, slo.tbt_ns, latency.switch_ns()))
        return views

    def _run(self, now_ns: int) -> bool:
        """Does what the turn needs next. False when its batch came to an end in the attempt."""
        turn = self._turn
        assert turn is not None
        if not self._bring_in(turn, now_ns):
            return bool(turn.batch.sequences)
        turn.loaded_ns = turn.loaded_ns or now_ns
        ready = [s for s in turn.batch.sequences if s.where is Where.DEVICE and self._grow(s)]
        self._bring_in_kv(turn.batch, ready)
        if ready:
            self._step(turn, ready, now_ns)
            return True
        if self.ledger.transfers.in_flight or self._kv.waiting:
            return True
        return not self._put_away(turn.batch)  # given up at once: look again

    def _bring_in_kv(self, batch: _Batch, ready: list[Sequence]) -> None:
        """Those that run come first: nobody is brought in to be put away again as soon as they grow."""
        growth = LOOKAHEAD_BLOCKS * len(ready)
        for sequence in batch.sequences:
            if sequence.where is Where.HOST:
                if not self._make_room(sequence, sequence.blocks_now() + growth):
                    return
                self._kv.bring_in(sequence)
                growth += LOOKAHEAD_BLOCKS

    def _grow(self, sequence: Sequence) -> bool:
        """A block for the position this step writes."""
        missing = sequence.blocks_now() - len(sequence.device)
        return missing <= 0 or (self._make_room(sequence, missing) and self._kv.grow(sequence, missing))

    def _step(self, turn: _Turn, ready: list[Sequence], now_ns: int) -> None:
        model = turn.batch.model
        if turn.started_ns is None:
            turn.started_ns = now_ns
        if model != self.active:
            self._switched(turn, now_ns)
        resumed = [s for s in ready if not s.running]
        if resumed:
            for sequence in resumed:
                sequence.running = True
            self._send(Phase(tuple(s.job.request for s in resumed), running=True))
        self._stepping = tuple(ready)
        self._flush()
        rows = tuple(DecodeRow(s.job.request, s.tokens[-1], s.cached, s.device) for s in ready)
        self._out.append(RunDecode(model, rows))

    # --- memory -----------------------------------------------------------------------------------------------------

    def _bring_in(self, turn: _Turn, now_ns: int) -> bool:
        model, weights = turn.batch.model, self.ledger.weights
        if self.active is not None and not weights.is_resident(self.active):
            self.active = None
        if weights.is_resident(model):
            return True
        if not weights.is_loading(model):
            refused = self._load(model, self._expendable(model), now_ns)
            if refused is None:
                turn.loading_ns = now_ns
            elif not self.ledger.device.moving and self._put_away(turn.batch):
                return self._bring_in(turn, now_ns)
        return False

    def _load(self, model: ModelId, expendable: list[ModelId], now_ns: int, *, spare: int = 0) -> NoPages | None:
        started = self.ledger.load(model, expendable, spare=spare)
        if isinstance(started, NoPages):
            return started
        self._loading_since[model] = now_ns
        return None

    def _make_room(self, sequence: Sequence, blocks: int) -> bool:
        """Whether the device now has `blocks` for the sequence. Cheapest first: (1) idle weights leave at once;
        (2) KV of the batch whose turn is furthest goes to the host, and the room is there when it has left."""
        shape, device = sequence.spec.manifest.kv, self.ledger.device
        for victim in self._expendable(sequence.job.model):
            if device.room(shape) >= blocks:
                return True
            self.ledger.evict(victim)
        if device.room(shape) >= blocks:
            return True
        if not device.moving:
            self._put_away_others()
        return device.room(shape) >= blocks

    def _put_away_others(self) -> bool:
        """Moves out the KV of that other batch whose turn is furthest away. True where room came of it at once."""
        for batch in reversed(self._upcoming()[1:]):
            idle = [s for s in batch.sequences if s.where is Where.DEVICE]
            if idle:
                return any([self._kv.put_away(sequence, self._leave) for sequence in idle])
        return False

    def _put_away(self, batch: _Batch) -> bool:
        """The same, and when there is no other: the youngest sequence of this very batch."""
        before = self.ledger.transfers.in_flight
        if self._put_away_others() or self.ledger.transfers.in_flight > before or self._kv.waiting:
            return self.ledger.transfers.in_flight == before and not self._kv.waiting
        own = [s for s in batch.sequences if s.where is Where.DEVICE]
        return bool(own) and self._kv.put_away(own[-1], self._leave)

    def _upcoming(self) -> list[_Batch]:
        """Batches in the order of their next turns, as far as it is known; the running one first."""
        by_id = {batch.batch: batch for batch in self._batches}
        order = [self._turn.batch.batch] if self._turn else []
        order += [turn.batch for turn in self._round]
        order += by_id
        return [by_id[i] for i in dict.fromkeys(order) if i in by_id]

    def _expendable(self, needed: ModelId) -> list[ModelId]:
        """Resident models whose weights may go, those needed last first."""
        position: dict[ModelId, int] = {}
        for index, batch in enumerate(self._upcoming()):
            position.setdefault(batch.model, index)
        keep = {needed} | {s.job.model for s in self._stepping}
        idle = [model for model in self.ledger.weights.resident() if model not in keep]
        return sorted(idle, key=lambda model: (-position.get(model, len(position)), model))

    def _prepare_next(self, now_ns: int) -> None:
        """The next turn's model and KV, while this one decodes, as far as there is room that nobody needs sooner."""
        current = self._stepping[0].job.model
        upcoming = [b for b in self._upcoming() if b.model != current]
        if not upcoming:
            return
        batch, weights = upcoming[0], self.ledger.weights
        if not weights.is_resident(batch.model) and not any(True for _ in weights.loading()):
            spare = self.ledger.budget.pages_per_slab
            if self._load(batch.model, self._expendable(batch.model), now_ns, spare=spare) is None:
                self.counters.prefetches += 1
        if weights.is_resident(batch.model) or weights.is_loading(batch.model):
            for sequence in batch.sequences:
                shape = sequence.spec.manifest.kv
                enough = self.ledger.device.room(shape) >= sequence.blocks_now() + LOOKAHEAD_BLOCKS
                if sequence.where is Where.HOST and enough:
                    self._kv.bring_in(sequence)

    # --- models, peers, messages --------------------------------------------------------------------------------------

    def _add_model(self, event: AddModel) -> None:
        spec = event.spec
        if not self.ledger.add_model(spec):
            self._send(ModelFailed(spec.model, "no address space is left"))
            return
        self._latency[spec.model] = Latency(spec.manifest, self._hardware)
        self._send(ModelAdded(spec.model))

    def _drop_models(self) -> None:
        in_use = {s.job.model for s in self._stepping} | {b.model for b in self._batches}
        for model in sorted(self._dropping - in_use):
            if self.ledger.weights.is_loading(model):
                continue
            self.ledger.drop_model(model)
            self._dropping.remove(model)
            del self._latency[model]
            self.active = None if self.active == model else self.active
            self._send(ModelDropped(model))

    def _answer_peers(self) -> None:
        for peer in sorted(self._forgetting):
            if not self._kv.reads_from(peer):
                self._forgetting.remove(peer)
                self._send(PeerForgotten(peer))

    def _switched(self, turn: _Turn, now_ns: int) -> None:
        self.active = turn.batch.model
        self.counters.switches += 1
        loading_ns, loaded_ns = turn.loading_ns, turn.loaded_ns or now_ns
        self._send(
            SwitchDone(
                self.active,
                prefetched=loading_ns is None,
                make_room_ns=0 if loading_ns is None else loading_ns - turn.wanted_ns,
                copy_ns=loaded_ns - (turn.wanted_ns if loading_ns is None else loading_ns),
                kv_ns=now_ns - loaded_ns,
                nbytes=self.ledger.specs[self.active].manifest.image_bytes,
            )
        )

    def _send(self, message: FromInstance) -> None:
        self._flush()
        self._out.append(Send(message))

    def _flush(self) -> None:
        """Memory effects so far go before whatever relies on them."""
        self._out += self.ledger.drain()

    def latencies(self) -> Mapping[ModelId, Latency]:
        return self._latency
