"""The second lane of an instance's device: what runs there beside the decode of the turn, and on which share.

The turn has the first lane, as it has the whole device where that is not divided. What the policy of lanes chooses runs
on the second one: a piece of a prompt, of the same model or of another one that is there, or whole prompts that share a
step, or steps of another batch. The device is divided anew only while both lanes are idle, as it has to be; so a
division lasts until both of their runs are over. Prompts are not prefilled on the first lane meanwhile.

The guard learns from each step beside another run (MuxWise §3.3.2); the estimates of the whole device do not.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from msgspec import Struct

from aegis.core.contention_guard import WHOLE, WORST, Beside, ContentionGuard, Decoding, Profile
from aegis.core.effects import DivideDevice, Row, Run
from aegis.core.events import Stepped
from aegis.core.ids import ModelId
from aegis.core.lane_views import Companion, Division, LaneChoice, LanePolicy, LanesView
from aegis.core.messages import StepsTook
from aegis.core.views import Renewal, RoundPolicy
from decode.batch_view import BatchViews
from decode.counters import Counters
from decode.eviction import Eviction
from decode.prefill_chunks import next_row
from decode.prompt_rows import PromptRows, is_alone, learnt_pieces
from decode.rows import decode_rows
from decode.sequences import Sequence, Where
from decode.turn_runs import FOR_EVER_NS
from decode.worklist import Batch

_UNDIVIDED: Final = (WHOLE,)
_OF_PREFILLS: Final = 3 / 4  # the power of its share that a prefill's speed is taken to be
_NEWEST_SHARE: Final = 1 / 4  # of how much longer a prefill takes on a share


class LaneOffers(Struct, frozen=True):
    """The divisions of a device, one share of each lane. Lanes are `timed` where they share the time of the same cores:
    two decodes gain nothing by that. With a `profile`, guards know from the beginning what a step takes on a share
    beside a prefill."""

    shares: tuple[tuple[int, ...], ...] = ()
    timed: bool = False
    profile: Profile | None = None


NO_LANES: Final = LaneOffers()


class SecondLane:
    """Without `offers` of two lanes, or without a policy of lanes, nothing ever runs here."""

    def __init__(
        self,
        offers: LaneOffers,
        policy: RoundPolicy,
        views: BatchViews,
        eviction: Eviction,
        counters: Counters,
        prompt_rows: PromptRows,
    ) -> None:
        self._policy = policy if isinstance(policy, LanePolicy) else None
        self._offers = [(shares[0], shares[1]) for shares in offers.shares if self._policy and len(shares) == 2]
        self._timed = offers.timed
        self._view = views.of
        self._work, self._step_times, self._ledger = views.work, views.step_times, views.ledger
        self._counters = counters
        self._eviction, self._prompt_rows = eviction, prompt_rows
        self._profile = offers.profile
        self._shares: tuple[int, ...] = _UNDIVIDED
        self._guards: dict[ModelId, ContentionGuard] = {}
        self._prefill_factors: dict[int, float] = {}  # by share: the time of prefills over that on the whole device
        self._step_factors: dict[
            tuple[int, bool], float
        ] = {}  # that of steps, by share and whether a prefill is beside
        self._choice: LaneChoice | None = None  # for the decode that is about to begin on the first lane
        self._companion: tuple[Decoding, Beside] | None = (
            None  # of the run on the first lane: what it is, and beside what
        )
        self._beside_prefill = False
        self.left: tuple[Sequence, ...] = ()  # whose steps on the second lane have just ended
        self.prompts: tuple[Row, ...] = ()  # in the run on the second lane
        self._until_ns = 0  # steps of that run go on
        self._has_joined = False  # somebody who may run here, since the run on the first lane began

    @property
    def _under_way(self) -> bool:
        return bool(self._work.beside)

    @property
    def _divided(self) -> bool:
        return self._shares != _UNDIVIDED

    @property
    def wants_end(self) -> bool:
        """Whether the run on the first lane should end: somebody new may run beside it, or nobody does any more and it
        is to have the whole device again."""
        return (self._has_joined or self._divided) and not self._under_way

    # --- choosing -----------------------------------------------------------------------------------------------------

    def joined(self, model: ModelId) -> None:
        """A request of the model has come. Where plans are not made anew for it, it waits for the end of the run."""
        if self._offers and self._work.rules.renewal is Renewal.ARRIVAL:
            self._has_joined |= self._ledger.weights.is_resident(model)

    def takes(self, batch: Batch, ready: list[Sequence], now_ns: int) -> bool:
        """Whether these sequences decode while a prompt of the batch, or something else, runs beside them. Both lanes
        are idle, or the second one is not."""
        if self._under_way:
            return True
        if self._offers:
            self._choice = self._chosen(batch, ready, now_ns)
        return self._choice is not None

    def fill(self, now_ns: int, *, begins: bool) -> tuple[DivideDevice | None, Batch | None]:
        """What has to be done before the run of the first lane `begins`, and whose run begins on the second lane."""
        if not self._offers:
            return None, None
        work, turn, choice = self._work, self._work.turn, self._choice
        self._choice = None
        if begins:
            self._has_joined = False
        if self._under_way or not work.stepping or turn is None:
            return None, None
        if not begins:
            if not self._divided:
                return None, None
            choice = self._chosen(turn.batch, list(work.stepping), now_ns)
            if choice and choice.shares != self._shares:
                choice = None  # it waits for the end of the step, so that the device can be divided anew
        batch = self._begin(choice, now_ns) if choice else None
        return (self._divide(choice.shares if choice and batch else _UNDIVIDED) if begins else None), batch

    def _divide(self, shares: tuple[int, ...]) -> DivideDevice | None:
        if shares == self._shares:
            return None
        self._shares = shares
        return DivideDevice(shares)

    def _chosen(self, batch: Batch, rows: list[Sequence], now_ns: int) -> LaneChoice | None:
        if self._policy is None or not batch.works:
            return None  # or all of it has left since
        if self._ledger.balloon.owes:
            return None  # pages are given back while nothing runs, and one lane or the other would always be busy
        decoding = _decoding(rows)
        step_ns = self._step_times.latency[batch.model].decode_ns(decoding.context, decoding.rows)
        companions = [
            companion
            for other in sorted(self._work.batches, key=lambda other: other is not batch)
            for companion in self._companions(other, batch, decoding, step_ns, now_ns)
        ]
        if not companions:
            return None
        return self._policy.beside(LanesView(self._view(batch, now_ns), step_ns, companions), now_ns)

    def _companions(
        self, other: Batch, batch: Batch, decoding: Decoding, step_ns: int, now_ns: int
    ) -> Iterable[Companion]:
        if not self._ledger.weights.is_resident(other.model) or now_ns < other.stuck_until_ns:
            return
        latency, guard = self._step_times.latency[other.model], self._guard(batch.model)
        if other.waiting and self._has_place(sequence := other.next_waiting(), own=self._is_own(other)):
            start = sequence.cached - sequence.lacks
            alone_ns, beside = latency.prefill_ns(sequence.cached, start), _beside_prompt(sequence)
            divisions = [
                Division(
                    shares,
                    round(step_ns * guard.factor(decoding, beside, shares[0])),
                    round(alone_ns * self._prefill_factor(shares[1])),
                    1 / self._step_factor(shares[0], prefill=True) + 1 / self._prefill_factor(shares[1]),
                )
                for shares in self._offers
            ]
            yield Companion(self._view(other, now_ns), True, alone_ns, divisions)
        rows = self._rows(other) if other is not batch else []
        if rows:
            theirs, own = _decoding(rows), self._guard(other.model)
            alone_ns = latency.decode_ns(theirs.context, theirs.rows)
            divisions = [
                Division(
                    shares,
                    round(step_ns * guard.factor(decoding, _beside(theirs), shares[0])),
                    round(alone_ns * own.factor(theirs, _beside(decoding), shares[1])),
                    sum([1 / self._step_factor(share, prefill=False) for share in shares]),
                )
                for shares in self._offers
            ]
            yield Companion(self._view(other, now_ns), False, alone_ns, divisions)

    def _is_own(self, batch: Batch) -> bool:
        """Whether the batch itself has the turn: for a pause nothing leaves."""
        turn = self._work.turn
        return turn is not None and not turn.pause and batch is turn.batch

    def _has_place(self, sequence: Sequence, *, own: bool) -> bool:
        """Whether its prompt can begin: only for one of the batch's `own` may anything leave. Prompts on the first lane
        would wait for one that cannot."""
        if sequence.where not in (Where.NOWHERE, Where.DEVICE) or not self._eviction.adapters.there(sequence):
            return False
        return own or self._eviction.fits(sequence)

    def _rows(self, batch: Batch) -> list[Sequence]:
        """The sequences of the batch that can have a step without anything having to leave the device."""
        ready = [s for s in batch.sequences if s.where is Where.DEVICE and not s.lacks and not s.leaving]
        return [s for s in ready if self._eviction.fits(s)]

    # --- runs ---------------------------------------------------------------------------------------------------------

    def _begin(self, choice: LaneChoice, now_ns: int) -> Batch | None:
        """The batch whose run begins, if there is room for it."""
        work = self._work
        batch = next((b for b in work.batches if b.batch == choice.batch), None)
        if batch is None:
            return None
        own = self._is_own(batch)
        if choice.prefills:
            sequence = batch.next_waiting()
            if not self._eviction.adapters.there(sequence):
                return None
            if not (own or self._eviction.fits(sequence)) or not self._eviction.grow(sequence):
                return None
            beside = _beside_prompt(sequence)  # as it was when the guard was asked
            prompts, self.prompts = self._pieces(batch, sequence, choice, now_ns)
            work.begin_beside(batch, prompts)
            for each, row in zip(prompts, self.prompts, strict=True):
                each.where, each.lacks = Where.DEVICE, each.cached - row.stop
        else:
            rows = [s for s in self._rows(batch) if self._eviction.fits(s) and self._eviction.grow(s)]
            if not rows:
                return None
            work.begin_beside(batch, tuple(rows))
            beside = _beside(_decoding(rows))
        self._companion, self._beside_prefill = (_decoding(list(work.stepping)), beside), choice.prefills
        self._until_ns = now_ns + (choice.within_ns or 0)
        return batch

    def _pieces(
        self, batch: Batch, first: Sequence, choice: LaneChoice, now_ns: int
    ) -> tuple[tuple[Sequence, ...], tuple[Row, ...]]:
        """The first prompt, or a piece of it, and the prompts that join it if all of it is run: by its deadline, unless
        it is late whoever joins it."""
        latency, slower = self._step_times.latency[batch.model], self._prefill_factor(choice.shares[1])
        within_ns = None if choice.within_ns is None else round(choice.within_ns / slower)
        rows = [next_row(first, latency, self._work.rules, within_ns)]
        joins_ns = max(within_ns, round(choice.joins_ns / slower)) if within_ns is not None else FOR_EVER_NS
        slo = self._ledger.specs[batch.model].slo
        left_ns = round((slo.due_ns(first.job.arrival_ns, first.generated) - now_ns) / slower)
        if left_ns >= latency.prefill_ns(rows[0].stop, rows[0].start):
            joins_ns = min(joins_ns, left_ns)
        joining = self._prompt_rows.joining(batch, first, rows, (), joins_ns)
        return (first, *joining), tuple(rows)

    def run(self, batch: Batch) -> Run:
        """The run that begins."""
        if self.prompts:
            return Run(batch.model, self.prompts, 1, self._until_ns, 1)
        rows = self._work.beside
        steps = 1 if self._ledger.balloon.owes else min([s.steps_held() for s in rows])
        return Run(batch.model, decode_rows(rows), steps, self._until_ns, 1)

    def ended(self) -> tuple[tuple[Sequence, ...], tuple[Row, ...]]:
        """The sequences of the run on the second lane, and its rows of prompts."""
        prompts, self.prompts = self.prompts, ()
        sequences = self._work.end_beside()
        self.left = () if prompts else sequences
        return sequences, prompts

    def forget_left(self) -> list[Sequence]:
        """The sequences whose steps on the second lane have ended and that are in a run or turn of neither lane."""
        left, self.left, turn = self.left, (), self._work.turn
        own = turn.batch.sequences if turn else ()
        return [s for s in left if not s.dropped and s not in own and s not in self._work.busy]

    def lets_in(self, batch: Batch, ready: list[Sequence]) -> bool:
        """Whether the next prompt of the batch has its step with those that are `ready` to decode: it comes before the
        one that runs here, and by the guard's word no stream waits too long for that step."""
        work, rules = self._work, self._work.rules
        if not (rules.overtakes_beside and self.prompts and ready and batch.waiting and self._companion):
            return False
        first, slo = batch.next_waiting(), self._ledger.specs[batch.model].slo
        if first.rank_ns >= min([s.rank_ns for s in work.beside]) or is_alone(first):
            return False
        if not self._has_place(first, own=False) or first.lacks > (rules.step_tokens or first.lacks):
            return False
        latency, decoding = self._step_times.latency[batch.model], _decoding(ready)
        slower = self._guard(batch.model).factor(decoding, self._companion[1], self._shares[0])
        # what shares time is slowed alike; a part of the compute slows prefills more than it does decodes
        prefill_slower = slower if self._timed else max(slower, self._prefill_factor(self._shares[0]))
        step_ns = prefill_slower * latency.prefill_ns(first.cached, first.cached - first.lacks)
        step_ns += slower * latency.beside_ns(decoding.context, decoding.rows)
        return step_ns <= min(slo.tbt_ns, slo.gap_ns)

    def stale(self) -> bool:
        """Whether the steps under way on the second lane should end: their batch has the turn, pages are owed, or one
        of their sequences goes on elsewhere."""
        rows, turn = self._work.beside, self._work.turn
        if not rows or self.prompts:
            return False
        if any([s.leaving for s in rows]):
            return True
        return self._ledger.balloon.owes or (turn is not None and rows[0].job.model == turn.batch.model)

    # --- learning -----------------------------------------------------------------------------------------------------

    def learn_steps(self, stepped: tuple[Sequence, ...], event: Stepped, now_ns: int) -> StepsTook | None:
        """Of decode steps alone, before their tokens are counted; returns the report for proxies, if it is time."""
        steps, rows = len(event.steps), len(stepped)
        context = sum([s.cached for s in stepped]) + rows * (steps - 1) // 2
        model, step_ns = stepped[0].job.model, event.duration_ns // steps
        if self._saw_steps(model, rows, context, steps, step_ns, lane=event.lane):
            return None
        return self._step_times.saw(model, now_ns, context_tokens=context, rows=rows, step_ns=step_ns)

    def learn_prompts(
        self, stepped: tuple[Sequence, ...], rows: tuple[Row, ...], streams: tuple[Sequence, ...], event: Stepped
    ) -> None:
        """Learns how long a step took that had these `rows` of prompts, and in which `streams` decoded."""
        model, pieces = stepped[0].job.model, learnt_pieces(stepped, rows)
        if event.duration_ns and not self._saw_prefill(model, pieces, event):
            self._prompt_rows.learn(pieces, streams, model, event.duration_ns)

    def _saw_steps(self, model: ModelId, rows: int, context: int, steps: int, step_ns: int, *, lane: int) -> bool:
        """Whether these `steps` were run on a part of the device, and say nothing of the whole."""
        if not self._divided or self._companion is None:
            return self._divided
        share, factor = self._shares[lane], step_ns / self._step_times.latency[model].decode_ns(context, rows)
        beside = _beside(self._companion[0]) if lane else self._companion[1]
        decoding, guard = Decoding(rows, context), self._guard(model)
        self._counters.guarded_steps += steps
        if factor > guard.factor(decoding, beside, share):
            self._counters.guard_exceeded_steps += steps
        guard.saw(decoding, beside, share, factor)
        key = share, self._beside_prefill and not lane
        self._step_factors[key] = _learned(self._step_factor(share, prefill=key[1]), factor, share)
        return True

    def _saw_prefill(self, model: ModelId, pieces: list[tuple[int, int]], event: Stepped) -> bool:
        """The same of pieces of prompts, of each positions `[start, stop)`. Where streams never pause, no prompt ever
        has the whole device; so its estimate learns from a part, nearly in proportion, since prefills are bound by
        compute."""
        if not self._divided:
            return False
        if not event.lane:
            return True  # a prompt that overtook this lane's, in a step with streams on a share: it says nothing
        share, latency = self._shares[event.lane], self._step_times.latency[model]
        (start, stop), *joined = pieces
        alone_ns = latency.prefill_ns(stop, start) + sum([latency.joined_ns(stop, start) for start, stop in joined])
        factor = event.duration_ns / alone_ns
        of_whole_ns = event.processor_ns or round(event.duration_ns * (share / WHOLE) ** _OF_PREFILLS)
        latency.saw_step(pieces, of_whole_ns)
        self._prefill_factors[share] = _learned(self._prefill_factor(share), factor, share)
        return True

    def forget(self, model: ModelId) -> None:
        self._guards.pop(model, None)

    def _guard(self, model: ModelId) -> ContentionGuard:
        guard = self._guards.get(model)
        if guard is None:
            guard = self._guards[model] = ContentionGuard(profile=self._profile)
        return guard

    def _step_factor(self, share: int, *, prefill: bool) -> float:
        """What is to be expected, rather than the worst. At first, steps that share a device's time lose in proportion,
        and others the mean of that and of nothing."""
        return self._step_factors.get((share, prefill)) or (WHOLE / share) ** (1.0 if self._timed else 0.5)

    def _prefill_factor(self, share: int) -> float:
        return self._prefill_factors.get(share, WHOLE / share)


def _learned(before: float, factor: float, share: int) -> float:
    """No part of a device is faster than all of it, nor slower than in proportion and for the worst contention: what is
    beyond that is an error of the estimate for the whole device."""
    factor = min(max(factor, 1.0), WHOLE / share * (1 + WORST))
    return before + (factor - before) * _NEWEST_SHARE


def _beside_prompt(sequence: Sequence) -> Beside:
    return Beside(sequence.lacks, sequence.cached - sequence.lacks)


def _decoding(rows: list[Sequence]) -> Decoding:
    return Decoding(len(rows), sum([s.cached for s in rows]))


def _beside(decoding: Decoding) -> Beside:
    return Beside(decoding.rows, decoding.context)
