"""Room on a decode instance's device: made for the turn that runs and those after it, given up for other instances.

Blocks that a sequence has ahead of its next step go to a sequence that needs them now. After that the cheapest leaves
first: (1) weights, which leave at once: those of models without requests, the least recently used first, then those
that are needed last; (2) KV of the batch whose turn is furthest, which moves to host slabs; (3) a prefetch under way;
(4) the youngest sequence of the batch itself. Before anything leaves, the device is asked for more pages, and if
nothing can leave, they are asked for urgently. Where KV is divided among models, a sequence beyond the part of its own
model has only that model's KV to make room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from aegis.core.ids import ModelId
from aegis.core.messages import TakeBack
from decode.adapters import Adapters
from decode.counters import Counters
from decode.eviction_reasons import EvictionReasons
from decode.kv_swap import KvSwap
from decode.sequences import DEVICE, HOST, Room, Sequence, Where
from decode.worklist import AHEAD_BLOCKS, LOOKAHEAD_BLOCKS, Batch, RunningTurn, WorkList
from memory.balloon import PageRequestState
from memory.ledger import Ledger
from memory.weight_eviction import WeightEviction


class Eviction:
    """`give_up` ends a sequence whose KV has no place anywhere. If there are `reasons`, evictions are explained."""

    def __init__(
        self,
        ledger: Ledger,
        kv: KvSwap,
        work: WorkList,
        counters: Counters,
        give_up: Callable[[Sequence, str], None],
        reasons: EvictionReasons | None = None,
    ) -> None:
        self._ledger = ledger
        self._kv = kv
        self._work = work
        self._counters = counters
        self._give_up = give_up
        self._reasons = reasons
        self._weights = WeightEviction(ledger, reasons)
        self.adapters = Adapters(ledger, work)
        self.expected: set[ModelId] = set()  # models whose requests are to come from elsewhere

    # --- for the turn that runs ---------------------------------------------------------------------------------------

    def load(self, model: ModelId, *, spare: int = 0, prefetch: bool = False, base: ModelId | None = None) -> bool:
        """Whether the model's weights are on their way now. `spare` pages remain free. Those of an adapter come at the
        cost of what its `base` may cost."""
        ledger = self._ledger
        pages = ledger.budget.weight_pages(ledger.specs[model].manifest.image_bytes)
        if ledger.pool.free < pages + spare:
            self._give_up_ahead()
        if ledger.must_wait(pages + spare):
            return False
        return self._weights.load(model, self._victims(base or model), spare=spare, prefetch=prefetch)

    def bring_in(self, batch: Batch, *, decodes: bool = True) -> None:
        """Loads missing adapters. Starts the swap-in of missing KV, if the batch `decodes`, and of the KV that the next
        prefill has. Sequences whose KV is there come first: no KV is brought in that has to leave again as soon as they
        grow. Nor is that of a sequence for whose adapter there is no room: it is what leaves to make this room."""
        following = batch.next_waiting() if batch.waiting else None
        due = [s for s in batch.sequences if (s is following if s.lacks else decodes)]
        self.adapters.bring_in(batch, due, lambda adapter, kv: self.load(adapter, spare=kv, base=batch.model))
        away = [s for s in due if s.where is HOST and not self.adapters.pages(s)]
        if not away:
            return
        there = [sequence for sequence in batch.sequences if sequence.where in (Where.ARRIVING, Where.DEVICE)]
        more = sum([growth(sequence) for sequence in there])
        for at, sequence in enumerate(away):
            if not self._make(sequence, sequence.blocks_now() + more):
                for refused in away[at:]:
                    refused.refused = True
                return
            self._kv.bring_in(sequence)
            more += growth(sequence)

    def grow(self, sequence: Sequence) -> bool:
        """A block for the position that the next step writes. Not without its adapter."""
        if not self.adapters.there(sequence):
            return False
        missing = sequence.blocks_now() - sequence.held
        if missing > 0 and self._ledger.device.room(sequence.shape) < missing:
            self._give_up_ahead()
        sequence.refused = missing > 0 and not (self._make(sequence, missing) and self._kv.grow(sequence, missing))
        return not sequence.refused

    def fits(self, sequence: Sequence) -> bool:
        """Whether its next run needs nothing that has to be made room for."""
        return (
            self.adapters.there(sequence)
            and self._ledger.device.room(sequence.shape) >= sequence.blocks_now() - sequence.held
        )

    def grow_ahead(self, sequences: Iterable[Sequence]) -> None:
        """Blocks for further steps, so that a run need not end for lack of them, as long as no other KV has to leave
        for that."""
        for sequence in sequences:
            ahead = sequence.blocks_ahead(AHEAD_BLOCKS) - sequence.held
            if ahead > self._ledger.device.spare(sequence.shape):
                ahead = sequence.blocks_ahead(LOOKAHEAD_BLOCKS) - sequence.held
            if ahead > 0 and self._in_its_part(sequence, ahead):
                self._kv.grow(sequence, ahead)

    def clear(self, turn: RunningTurn) -> Room:
        """Makes room when the turn cannot go on: moves KV of other batches out and, if there is none, that of its own
        youngest sequence. If nothing is left to move, other instances are asked to give pages back. A turn that would
        cost its own model KV is passed over."""
        if (
            self._ledger.balloon.request_state is PageRequestState.ASKED
            or self._ledger.device.moving
            or self._kv.waiting
        ):
            return Room.LATER
        batch = turn.batch
        if self._work.pass_over(batch, self._holders(turn.first)):
            return Room.NOW
        divided = self._work.rules.divides_kv and self._ledger.weights.is_resident(batch.model)
        room = Room.NONE if divided else self._put_away_others(batch.model)
        if room is Room.NONE and self._abandon_prefetch(batch.model):
            return Room.LATER
        own = self._idle(batch) or (self._idle_alike(batch) if divided else [])
        if room is Room.NONE and own:
            room = self._put_away(own[-1])
            if self._reasons and own[-1].where is Where.HOST:
                self._ledger.effects.append(self._reasons.youngest(own[-1]))
        if room is Room.NONE and self._ledger.transfers.in_flight:
            return Room.LATER  # KV that arrives can leave again then
        if room is Room.NONE and self._ledger.balloon.stands_still and self._evict_all(turn.first):
            return Room.NOW  # whatever the rules say, because no instance will give more
        if room is Room.NONE:
            self._weights.evict_all(self._victims(batch.model), batch.model)
            self._ledger.balloon.want(self._lacking(turn.first) - self._ledger.pool.free, urgent=True)
        return room

    def prefetch(self) -> None:
        """Prefetches the models and KV of the turns to come, while this one decodes: the soonest first, as far as there
        is room that is not needed sooner. Weights are loaded one model at a time, each with the link to itself."""
        weights = self._ledger.weights
        loading = weights.loading()
        for after, batch in enumerate(self._work.after(self._work.stepping[0].job.model)):
            model, there = batch.model, weights.is_resident(batch.model)
            comes = weights.is_loading(model) or (not there and not loading and self._prefetch_weights(batch, after))
            if there or comes:
                self._prefetch_kv(batch)
            if not there:
                return

    def in_use(self) -> set[ModelId]:
        """Models that sequences in batches, or in the runs under way, are of, and their adapters."""
        busy = [sequence.job for sequence in self._work.busy]
        models = {job.model for job in busy} | {job.served for job in busy}
        return models | {batch.model for batch in self._work.batches} | self.adapters.wanted()

    def abandon_unwanted(self) -> None:
        """Abandons loads of models that no batch waits for any more, so that others have the link."""
        loading = self._ledger.weights.loading()
        if loading:
            wanted = {batch.model for batch in self._work.batches} | self.expected | self.adapters.wanted()
            self._abandon([model for model, _ in loading if model not in wanted])

    # --- for other instances ------------------------------------------------------------------------------------------

    def give_way(self, now_ns: int) -> bool:
        """Frees owed pages, as long as that disturbs no batch. True: the turn itself has to make way, because it has
        had its step and its time, or cannot go on."""
        balloon, turn = self._ledger.balloon, self._work.turn
        if turn and turn.started_ns is None and not balloon.stands_still:
            balloon.expire(now_ns)  # a turn keeps the pages it was granted until it has had a step
            return False
        self._give_up_ahead()
        balloon.settle(now_ns)
        victims = self._expendable(turn.batch.model if turn else None)
        for at in range(len(victims)):
            if not balloon.short:
                break
            self._weights.evict(victims, at, None)
            balloon.settle(now_ns)
        room = Room.NOW
        while room is Room.NOW and balloon.short and not self._ledger.device.moving:
            room = self._put_away_others(None)
            balloon.settle(now_ns)
        if room is not Room.NONE or turn is None or self._work.busy:
            return False
        return balloon.stands_still or (turn.started_ns is not None and balloon.must_yield(now_ns))

    def leave(self, batch: Batch) -> None:
        """Frees everything that a batch has on the device."""
        for sequence in [s for s in batch.sequences if s.where is Where.DEVICE]:
            self._put_away(sequence)
        there = [m for m in (batch.model, *sorted(self.adapters.wanted({batch.model}))) if self._is_there(m)]
        self._weights.evict_all(there, None)

    def give_back(self, asked: TakeBack, now_ns: int) -> None:
        """Gives back pages that no batch needs now."""
        if asked.gentle:
            self._give_up_ahead()
        needed = {batch.model for batch in self._work.batches} | self.adapters.wanted()
        self._weights.give_back(asked, [model for model in self._expendable(None) if model not in needed], now_ns)

    # ------------------------------------------------------------------------------------------------------------------

    def _prefetch_weights(self, batch: Batch, after: int) -> bool:
        """Whether the weights are on their way now. For the first model `after` the running one, KV of later batches
        makes room, unless it would be lost."""
        started = self.load(batch.model, spare=self._ledger.budget.pages_per_slab, prefetch=True)
        self._counters.prefetches += started
        waits = self._ledger.balloon.request_state is PageRequestState.ASKED or self._ledger.device.moving
        if not started and after == 0 and not waits and self._fit_together(batch):
            self._put_away_others(batch.model, but=(batch, *self._losing(self._work.batches)))
        return started

    def _prefetch_kv(self, batch: Batch) -> None:
        for sequence in batch.sequences:
            if sequence.where is HOST:
                needed = sequence.blocks_now() + LOOKAHEAD_BLOCKS
                if self._ledger.device.room(sequence.shape) >= needed:
                    batch.resting = None
                    self._kv.bring_in(sequence, ahead=True)

    def _make(self, sequence: Sequence, blocks: int) -> bool:
        """Whether the device now has `blocks` for the sequence, or else will have once something has left."""
        shape, device = sequence.shape, self._ledger.device
        if not self._in_its_part(sequence, blocks):
            return False
        if device.room(shape) >= blocks:
            return True
        turn = self._work.turn
        self._give_up_ahead(but=turn.batch if turn else None)
        if device.room(shape) >= blocks:
            return True
        if self._ledger.must_wait(self._ledger.kv_pages(shape, blocks), crowded=True):
            return False
        victims = self._victims(sequence.job.model)
        for at in range(len(victims)):
            self._weights.evict(victims, at, sequence.job.model)
            if device.room(shape) >= blocks:
                return True
        stay = self._holders(sequence)
        if not device.moving and self._put_away_others(sequence.job.model, but=stay) is Room.NONE:
            self._abandon_prefetch(sequence.job.model)
        return device.room(shape) >= blocks

    def _in_its_part(self, sequence: Sequence, blocks: int) -> bool:
        """Whether so many more blocks leave the sequence's model within its part of the device, where KV is divided. A
        sequence that is alone may have more: it could never go on."""
        if not self._work.rules.divides_kv:
            return True
        ledger, model = self._ledger, sequence.job.model
        alike = [s for batch in self._work.batches if batch.model == model for s in batch.sequences]
        others = sum([s.held for s in alike if s is not sequence])
        there = {model, *ledger.weights.resident(), *[loading for loading, _ in ledger.weights.loading()]}
        weights = sum([ledger.budget.weight_pages(ledger.specs[each].manifest.image_bytes) for each in there])
        slabs = (ledger.budget.pages - weights) // len(there - ledger.adapters) // ledger.budget.pages_per_slab
        return not others or others + sequence.held + blocks <= slabs * ledger.device.per_slab(sequence.shape)

    def _give_up_ahead(self, *, but: Batch | None = None) -> None:
        """Gives up the blocks ahead of all batches but that one and those in the run under way, and the blocks that the
        node was offered."""
        self._kv.give_up_offers()
        busy = self._work.busy if self._work.under_way else self._work.beside
        for batch in self._work.batches:
            for sequence in batch.sequences if batch is not but and batch.resting is None else ():
                if sequence.where is DEVICE and sequence not in busy:
                    self._kv.shrink(sequence)

    def _lacking(self, sequence: Sequence) -> int:
        """The free pages without which the sequence cannot make a step: all at once, because an instance that held a
        part and waited for the rest would have it taken, again and again."""
        weights, model = self._ledger.weights, sequence.job.model
        pages = self.adapters.kv_pages(sequence)
        if not weights.is_resident(model) and not weights.is_loading(model):
            pages += self._ledger.budget.weight_pages(self._ledger.specs[model].manifest.image_bytes)
        return pages + self.adapters.pages(sequence)

    def _is_there(self, model: ModelId) -> bool:
        return self._ledger.weights.is_resident(model)

    def _fit_together(self, following: Batch) -> bool:
        """Whether the device holds that batch and the running one, weights and KV, when all others have left."""
        ledger, running = self._ledger, self._work.turn.batch if self._work.turn else following
        pages = 0
        for batch in (running, following):
            manifest = ledger.specs[batch.model].manifest
            blocks = sum([s.blocks_ahead(LOOKAHEAD_BLOCKS) for s in batch.sequences])
            slabs = -(-blocks // ledger.device.per_slab(manifest.kv))
            pages += ledger.budget.weight_pages(manifest.image_bytes) + slabs * ledger.budget.pages_per_slab
        return pages <= ledger.balloon.held

    def _holders(self, sequence: Sequence) -> list[Batch]:
        """The batches of its model that lose KV if the sequence gets their room. It waits for a request to end instead,
        unless it decodes: those that can never be on the device together would take turns in losing their KV, with a
        prefill for each token."""
        if sequence.where is DEVICE and not sequence.lacks:
            return []
        alike = [b for b in self._work.batches if b.model == sequence.job.model and sequence not in b.sequences]
        return self._losing(alike)

    def _losing(self, batches: Iterable[Batch]) -> list[Batch]:
        """The batches with KV on the device that would be lost, because the host has no room for it."""
        return [b for b in batches if any([s.where is DEVICE and self._kv.loses(s) for s in b.sequences])]

    def _put_away_others(self, needed: ModelId | None, *, but: Iterable[Batch] = ()) -> Room:
        """Moves out the KV of that batch, the running one and these excepted, whose turn is furthest away. It is for
        the `needed` model; None: for another instance."""
        running = self._work.turn.batch if self._work.turn else None
        stay = (running, self._work.paused, *but)
        furthest = [batch for batch in reversed(self._work.upcoming()) if batch not in stay]
        for at, batch in enumerate(furthest):
            idle = self._idle(batch)
            if idle:
                rooms = [self._put_away(sequence) for sequence in idle]
                moved = [sequence for sequence in idle if sequence.where is Where.HOST] if self._reasons else []
                if self._reasons and moved:
                    spared = next((other for other in furthest[at + 1 :] if self._idle(other)), None)
                    self._ledger.effects.append(self._reasons.kv(moved, batch, spared, needed))
                return Room.NOW if Room.NOW in rooms else Room.LATER
        return Room.NONE

    def _idle(self, batch: Batch) -> list[Sequence]:
        """The batch's sequences whose KV is on the device and may leave it: they are in no run."""
        return [s for s in batch.sequences if s.where is DEVICE and s not in self._work.busy]

    def _idle_alike(self, batch: Batch) -> list[Sequence]:
        """Such sequences of the other batches of its model; those whose turns come last are at the end."""
        others = [other for other in self._work.upcoming() if other.model == batch.model and other is not batch]
        return [sequence for other in others for sequence in self._idle(other)]

    def _put_away(self, sequence: Sequence) -> Room:
        """If the host has no slab to give, the sequence is given up and prefilled again."""
        room = self._kv.put_away(sequence)
        if room is Room.NOW:
            self._give_up(sequence, "its KV has to leave the device, and the host has no slab for it")
        return room

    def _victims(self, needed: ModelId) -> list[ModelId]:
        """Models whose weights may leave for another model's weights or KV."""
        return self._expendable(needed) if self._work.rules.evicts else []

    def _expendable(self, needed: ModelId | None) -> list[ModelId]:
        """Resident models whose weights may go, those needed last first: models without requests in the order of their
        last use, then those whose turns come after that of the `needed` one, the furthest first."""
        places, busy = self._work.places() | self.adapters.places(), self._work.busy
        never = len(places)
        sooner = -1 if needed is None else places.get(needed, never)
        running = busy[0].job.model if busy else None
        beside = busy[-1].job.model if busy else None  # on the second lane, if there is a run
        resident = self._ledger.weights.resident()
        paused = self._work.paused.model if self._work.paused else None
        stay = {needed, running, beside, paused}
        if self._ledger.adapters:
            stay |= self.adapters.wanted(stay) | {sequence.job.adapter for sequence in busy}
        idle = [m for m in resident if m not in stay and places.get(m, never) >= sooner]
        return sorted(idle, key=lambda model: -places.get(model, never))  # the order of use remains

    def _evict_all(self, but: Sequence) -> bool:
        """Whether there was anything to evict: all that this sequence does not need, adapters of its batch, too."""
        model = but.job.model
        adapters = self.adapters.wanted({model}) - {s.job.adapter for s in (but, *self._work.busy)}
        victims = self._expendable(model) + [adapter for adapter in sorted(adapters) if self._is_there(adapter)]
        self._weights.evict_all(victims, model)
        return bool(victims)

    def _abandon_prefetch(self, needed: ModelId) -> bool:
        """Whether memory comes back from a model that was being loaded for later."""
        keep = {needed} | self.adapters.wanted({needed})
        return self._abandon([model for model, _ in self._ledger.weights.loading() if model not in keep])

    def _abandon(self, models: list[ModelId]) -> bool:
        self._counters.abandoned += self._weights.abandon(models)
        return bool(models)


def growth(sequence: Sequence) -> int:
    """The blocks that are kept free for it to grow into, while others are brought in."""
    return max(sequence.blocks_ahead(LOOKAHEAD_BLOCKS) - sequence.held, 0)
