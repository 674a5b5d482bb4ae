"""The work list of a decode instance: its batches, and rounds of turns over them (Aegaeon §4.3, Algorithm 2)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

from aegis.core.decision import Plan
from aegis.core.ids import ModelId
from aegis.core.model import ModelSpec
from aegis.core.switching import Switching
from aegis.core.views import BatchView, Renewal, RoundPolicy, Turn
from decode.batch_requests import BatchRequests
from decode.sequences import Sequence, Stepping

LOOKAHEAD_BLOCKS: Final = 4  # room for growth a sequence is counted with when it joins a batch (Aegaeon's artifact)
AHEAD_BLOCKS: Final = 16  # that a run gets if they lie idle in slabs, so that it does not end for lack of blocks
PLAN_NS: Final = 1_000_000
"""For each of its batches, that a plan which sheds some is kept whoever arrives before its turn begins. Under overload
there are hundreds of batches and of arrivals a second, and a plan takes some 20 µs for each batch: with this, 2 % of
the time."""

_RANK: Final = attrgetter("rank_ns")


@dataclass(slots=True, eq=False)
class Batch:
    """Sequences of one model that are decoded together; never empty. `waiting` of them are to be prefilled first, and a
    part of that may be done. If a prefill was `chunked`, sequences that decode have a step before the next chunk. Those
    in a run on the second lane are `beside`, and wait for nothing meanwhile."""

    batch: int
    model: ModelId
    sequences: list[Sequence]
    waiting: int = 0
    decoded_ns: int = -1  # when its last turn with decode steps was given to it
    ran_ns: int = -1  # when a run in a turn of its own last began
    chunked: bool = False
    beside: int = 0  # of its sequences are in the run under way on the second lane
    stuck_until_ns: int = 0  # until then no turn pauses for it: it had no room for its step
    passed_over: bool = False  # it has no turn until a request leaves: others of its model have the room it lacks
    resting: BatchRequests | None = None
    """What was found of its sequences, none of which has KV on the device or on its way there; None: look at them."""

    def add(self, sequence: Sequence) -> None:
        self.resting = None
        self.sequences.append(sequence)
        self.waiting += sequence.lacks > 0

    def blocks_ahead(self) -> int:
        """The blocks that it needs, with room to grow. Who joins asks every batch of the model."""
        if self.resting is None:
            return _blocks_ahead(self.sequences)
        if self.resting.blocks_ahead is None:
            self.resting.blocks_ahead = _blocks_ahead(self.sequences)
        return self.resting.blocks_ahead

    def next_waiting(self) -> Sequence:
        """The sequence that is prefilled next."""
        return min([s for s in self.sequences if s.lacks and not s.beside], key=_RANK)

    @property
    def works(self) -> bool:
        """Whether the first lane can do something for it."""
        return len(self.sequences) > self.beside

    def waiting_behind(self, first: Sequence) -> list[Sequence]:
        """The others that wait, in the order in which they are prefilled."""
        return sorted([s for s in self.sequences if s.lacks and not s.beside and s is not first], key=_RANK)


@dataclass(slots=True)
class RunningTurn:
    """`started_ns` is that of its first step: time spent on loading is not taken from the quota. Nor is that of first
    prefills of requests that had lost their KV; `begun` says that there was another run. While it `waits` for
    weights that are on their way, it may be paused run after run."""

    batch: Batch
    quota_ns: int | None
    switching: Switching
    started_ns: int | None = None
    prefills: bool = True
    decodes: bool = True
    free_until_ns: int | None = None
    pause: bool = False
    begun: bool = False
    waits: bool = False

    @property
    def ends_ns(self) -> int | None:
        return None if self.started_ns is None or self.quota_ns is None else self.started_ns + self.quota_ns

    @property
    def prefills_next(self) -> bool:
        return self.prefills and self.batch.waiting > 0

    @property
    def first(self) -> Sequence:
        """The first of the sequences that the turn is for, as their KV is brought in; of those that wait, the next."""
        following = self.batch.next_waiting() if self.prefills_next else None
        mine = (s for s in self.batch.sequences if (s is following if s.lacks else self.decodes) and not s.beside)
        return next(mine)

    def loads(self, now_ns: int) -> None:
        """A load of its weights begins."""
        self.waits = False
        self.switching.loading_ns = now_ns

    def loaded(self, now_ns: int) -> None:
        """The weights of the turn's model are on the device."""
        self.waits = False
        self.switching.loaded(now_ns)

    def used_up(self, now_ns: int) -> bool:
        if self.pause and self.started_ns is not None:
            return True
        return self.ends_ns is not None and now_ns >= self.ends_ns


class WorkList:
    """Batches in the order in which they were made. A plan has turns for the batches that are there when it is made."""

    __slots__ = (
        "_by_id",
        "_had_pause",
        "_has_arrivals",
        "_has_own_arrivals",
        "_has_passed_over",
        "_has_planned_for_wait",
        "_is_stale",
        "_next_batch",
        "_paused",
        "_places",
        "_policy",
        "_round",
        "_stuck_beside",
        "_upcoming",
        "batches",
        "beside",
        "plan",
        "rules",
        "stepping",
        "turn",
        "under_way",
    )

    def __init__(self, policy: RoundPolicy) -> None:
        self.rules = policy.rules
        self._policy = policy
        self._has_arrivals = False  # since the last plan
        self._has_own_arrivals = False  # of them, some for the batch that had the turn
        self._has_passed_over = False  # any batch
        self._has_planned_for_wait = False  # since the last run began
        self._is_stale = False  # the last plan is, for other reasons: a prefill was cut, or is to be run again
        self._next_batch = 0
        self._round: deque[Turn] = deque()
        self.plan = Plan((), (), 0)  # the last one
        self.batches: list[Batch] = []
        self._by_id: dict[int, Batch] = {}
        self._upcoming: list[Batch] | None = None  # while no turn is given and no batch comes or goes
        self._places: dict[ModelId, int] | None = None
        self.turn: RunningTurn | None = None
        self._had_pause: set[int] = set()  # batches, since the last run that was no pause
        self._paused: RunningTurn | None = None  # the turn that goes on after this one, which is a pause of it
        self.stepping: tuple[Sequence, ...] = ()  # in the run under way, or about to begin
        self.under_way = False  # the run has begun: its blocks are not to be touched
        self.beside: tuple[Sequence, ...] = ()  # in the run under way on the second lane
        self._stuck_beside: list[Batch] = []  # for which it left no pause

    def join(self, sequence: Sequence, capacity_blocks: int) -> None:
        """(1) The first batch of the same model with room; (2) a new one at the end of the list."""
        self._has_arrivals = True
        model = sequence.job.model
        for batch in self.batches[-1:] if self.rules.in_order else self.batches:
            if batch.model == model and self._fit(batch, [sequence], capacity_blocks):
                batch.add(sequence)
                self._has_own_arrivals |= self.turn is not None and self.turn.batch is batch
                return
        self._next_batch += 1
        self._reordered()
        batch = self._by_id[self._next_batch] = Batch(self._next_batch, model, [])
        self.batches.append(batch)
        batch.add(sequence)

    def leave(self, sequence: Sequence) -> None:
        batch = next(b for b in self.batches if sequence in b.sequences)
        if self._has_passed_over:
            self._has_passed_over, self._is_stale = False, True
            for each in self.batches:
                each.passed_over = False
        batch.resting = None
        batch.sequences.remove(sequence)
        batch.waiting -= sequence.lacks > 0 and not sequence.beside
        batch.beside -= sequence.beside
        if not batch.sequences:
            self._remove(batch)

    def _fit(self, batch: Batch, more: list[Sequence], capacity_blocks: int) -> bool:
        """Whether they can be one batch with these, with room to grow."""
        if len(batch.sequences) + len(more) > self.rules.max_batch:
            return False
        return batch.blocks_ahead() + _blocks_ahead(more) <= capacity_blocks

    def _take_over(self, batch: Batch, capacity_blocks: int) -> None:
        """A batch that is given the turn takes over the other ones of its model, where they fit: steps read all weights
        for each batch. Nobody has to wait longer for that."""
        for other in [b for b in self.batches if b.model == batch.model and b is not batch and not b.beside]:
            if self._fit(batch, other.sequences, capacity_blocks):
                batch.resting = None
                batch.sequences += other.sequences
                batch.waiting += other.waiting
                self._remove(other)

    def _remove(self, batch: Batch) -> None:
        self.batches.remove(batch)
        del self._by_id[batch.batch]
        for turn in (self.turn, self._paused):
            if turn and turn.batch is batch:
                turn.waits = False
        self._reordered()

    def waits_again(self, sequence: Sequence, *, was_all: bool) -> None:
        """The step that ran the sequence's prompt has failed, so that it is to be run again; `was_all`: the step was to
        run all that was left of it."""
        batch = next(b for b in self.batches if sequence in b.sequences)
        batch.resting = None
        batch.waiting += was_all
        batch.chunked = False
        self._is_stale = True

    def wait_for_weights(self, turn: RunningTurn) -> bool:
        """Whether a new plan is made, by which others may go on meanwhile, where the rules say so: at most one between
        two runs, whichever turn asks."""
        if turn.waits or not self.rules.fills_loads:
            return False
        turn.waits = True
        if self._has_planned_for_wait:
            return False
        self._has_planned_for_wait = self._is_stale = True
        return True

    @property
    def awaited(self) -> ModelId | None:
        """The model for whose weights a turn is paused."""
        return self._paused.batch.model if self._paused and self._paused.waits else None

    def end_wait(self) -> None:
        """The awaited weights are there, or not on their way any more: the pause is over as soon as its run can end."""
        assert self._paused is not None
        self._paused.waits, self._is_stale = False, True

    def cut(self) -> None:
        """A prefill was cut, because another batch may need the next step sooner."""
        self._is_stale = True

    def ended(self) -> tuple[Sequence, ...]:
        """The sequences of the run on the first lane, which has ended."""
        stepped, self.stepping, self.under_way = self.stepping, (), False
        return stepped

    @property
    def busy(self) -> tuple[Sequence, ...]:
        """The sequences whose KV a run on any lane reads and writes, or is about to."""
        return self.stepping + self.beside if self.beside else self.stepping

    def begin_beside(self, batch: Batch, sequences: tuple[Sequence, ...]) -> None:
        """A run of the batch begins on the second lane."""
        assert not self.beside
        self.beside, batch.resting = sequences, None
        for sequence in sequences:
            sequence.beside = True
            batch.beside += 1
            batch.waiting -= sequence.lacks > 0
        self._reordered()

    def end_beside(self) -> tuple[Sequence, ...]:
        """The sequences of the run on the second lane, which has ended."""
        ended, self.beside = self.beside, ()
        for batch in self._stuck_beside:
            batch.stuck_until_ns, self._is_stale = 0, True
        self._stuck_beside.clear()
        for sequence in ended:
            if not sequence.dropped:
                batch = next(b for b in self.batches if sequence in b.sequences)
                batch.resting = None
                batch.beside -= 1
                batch.waiting += sequence.lacks > 0
                self._is_stale |= sequence.lacks > 0  # the turns of now were planned without what is left of it
            sequence.beside = False
        return ended

    def turn_now(
        self, now_ns: int, view: Callable[[Batch], BatchView], capacity_blocks: Callable[[ModelSpec], int]
    ) -> RunningTurn | None:
        """The turn that goes on, or the next one, of the next round if need be; None if there is no work."""
        turn = self.turn
        goes_on = turn is not None and not turn.used_up(now_ns) and _has_work(turn, turn.batch)
        if goes_on and not self.outdated(now_ns):
            return turn
        if turn is not None and turn.pause and not goes_on:
            self._is_stale = True
        self._reordered()
        if not self.batches or (self.beside and not any([batch.works for batch in self.batches])):
            self.turn = None
            return None
        planned, batch = self._planned(now_ns, view)
        if goes_on and turn and turn.waits and batch is turn.batch and not planned.pause:
            return turn  # nobody goes on meanwhile, and it has what it was given
        batch.resting = None
        self.turn = RunningTurn(
            batch,
            planned.quota_ns,
            Switching(batch.model, now_ns),
            prefills=planned.prefills,
            decodes=planned.decodes,
            free_until_ns=planned.free_until_ns,
            pause=planned.pause,
        )
        if turn is not None and not turn.pause:
            self._paused = turn if goes_on else None
        if planned.pause:
            return self.turn
        paused, self._paused = self._paused, None
        if self.rules.merges and not (turn and turn.batch is batch):
            self._take_over(batch, capacity_blocks(batch.sequences[0].spec))
        if goes_on and turn and turn.batch is batch:
            self.turn.switching, self.turn.started_ns, self.turn.begun = turn.switching, turn.started_ns, turn.begun
        elif paused and paused.batch is batch and not paused.used_up(now_ns):
            self.turn.started_ns, self.turn.begun = paused.started_ns, paused.begun
            self.turn.waits = paused.waits
        elif planned.decodes:
            batch.decoded_ns = now_ns
        return self.turn

    @property
    def holder(self) -> Batch | None:
        """The batch that has the turn, also while it is paused."""
        return self.paused or (self.turn.batch if self.turn else None)

    @property
    def paused(self) -> Batch | None:
        """The batch whose turn is paused; it keeps what it has on the device."""
        return self._paused.batch if self._paused else None

    def begins(self, turn: RunningTurn, stepping: Stepping, now_ns: int) -> None:
        """A run of the turn. Between two pauses for one batch there is a run of the turn that they interrupt, or that
        one would starve."""
        self._has_planned_for_wait = False
        if not turn.begun:
            turn.started_ns, turn.begun = now_ns, not all([_is_again(sequence) for sequence in stepping])
        if turn.pause:
            self._had_pause.add(turn.batch.batch)
        else:
            self._had_pause.clear()
            turn.batch.ran_ns = now_ns

    def _bars(self, batch: Batch, now_ns: int) -> bool:
        holder = self._paused or self.turn
        had = batch.batch in self._had_pause and not (holder and holder.waits)
        return had or now_ns < batch.stuck_until_ns

    def give_up_pause(self, now_ns: int, until_ns: int, *, fits: bool) -> None:
        """Ends a pause in which nothing can be run. Its batch has no other one until then or, if its prompt `fits`,
        until the run on the second lane is over, which was in its way. If others had runs in pauses before it, the
        change to the turn that goes on is timed from now on."""
        assert self.turn is not None and self.turn.pause
        batch = self.turn.batch
        batch.stuck_until_ns = until_ns
        if fits and self.beside:
            self._stuck_beside.append(batch)
        self.turn, self._paused = self._paused, None
        if self.turn and self._had_pause:
            self.turn.switching = Switching(self.turn.batch.model, now_ns)
        self._is_stale = True
        self._reordered()

    def pass_over(self, batch: Batch, others: Iterable[Batch]) -> bool:
        """Ends the batch's turn, if one of the others can go on meanwhile: the batch has no other turn before a request
        leaves. Whether it was ended."""
        if not any([other.works and not other.passed_over for other in others]):
            return False
        batch.passed_over = self._has_passed_over = self._is_stale = True
        self.end_turn()
        return True

    def end_turn(self) -> None:
        """Ends the turn before its time."""
        self.turn = self._paused = None
        self._reordered()

    def had_turn_ns(self, batch: Batch, now_ns: int) -> int | None:
        """The time for which the batch has had the turn, from the first step on; None: it does not have the turn, or
        has used it up."""
        turn = self._paused or self.turn
        if turn is None or turn.pause or turn.batch is not batch or turn.used_up(now_ns):
            return None
        return 0 if turn.started_ns is None else now_ns - turn.started_ns

    def outdated(self, now_ns: int) -> bool:
        """Whether another plan is to be made before anything else is done."""
        if self.rules.renewal is not Renewal.ARRIVAL:
            return False
        if self._is_stale or not self._has_arrivals:
            return self._is_stale
        batches, turns, made_ns = self.plan
        if not (turns and turns[-1].forecast):
            return True
        if self.turn is not None and self.turn.started_ns is not None and not self._has_own_arrivals:
            return False  # until the turn is over, which makes a new plan
        return now_ns >= made_ns + len(batches) * PLAN_NS

    def _planned(self, now_ns: int, view: Callable[[Batch], BatchView]) -> tuple[Turn, Batch]:
        """The next turn with something to do, of a new plan if need be."""
        forecast = bool(self._round) and self._round[0].forecast
        if self.outdated(now_ns) or forecast or self.rules.renewal is Renewal.TURN:
            self._round.clear()
        for again in (True, False):
            while self._round:
                planned = self._round.popleft()
                batch = self._by_id.get(planned.batch)
                if batch and _has_work(planned, batch) and not (planned.pause and self._bars(batch, now_ns)):
                    return planned, batch
            if again:
                self._has_arrivals = self._has_own_arrivals = self._is_stale = False
                views = [view(batch) for batch in self.batches if batch.works and not batch.passed_over]
                self.plan = Plan(views, self._policy.plan(views, now_ns), now_ns)
                self._round.extend(self.plan.turns)
        raise AssertionError("the policy plans nothing that can be done")

    def had_choice(self, previous: RunningTurn | None) -> bool:
        """Whether the turn that was just given belongs to another batch than before, or could have."""
        turn = self.turn
        return len(self.plan.turns) > 1 or previous is None or turn is None or turn.batch is not previous.batch

    def given(self) -> int:
        """The place in the plan of the turn that was just given."""
        return len(self.plan.turns) - len(self._round) - 1

    def after(self, model: ModelId) -> Iterator[Batch]:
        """The batches of other models in the order of their next turns, as far as it is known."""
        return (batch for batch in self.upcoming() if batch.model != model)

    def upcoming(self) -> list[Batch]:
        """Batches in the order of their next turns, as far as it is known; the running one first. Asked several times
        for each event, and seldom another one."""
        if self._upcoming is None:
            by_id = self._by_id
            order = [self.turn.batch.batch] if self.turn else []
            order += [turn.batch for turn in self._round]
            order += by_id
            self._upcoming = [by_id[i] for i in dict.fromkeys(order) if i in by_id]
        return self._upcoming

    def places(self) -> dict[ModelId, int]:
        """Each model's first place in that order."""
        if self._places is None:
            self._places = {}
            for place, batch in enumerate(self.upcoming()):
                self._places.setdefault(batch.model, place)
        return self._places

    def _reordered(self) -> None:
        self._upcoming = self._places = None


def _is_again(sequence: Sequence) -> bool:
    """Whether it is prefilled anew, with the tokens it has."""
    return bool(sequence.job.sent) and sequence.generated == len(sequence.job.sent)


def _blocks_ahead(sequences: list[Sequence]) -> int:
    return sum([sequence.blocks_ahead(LOOKAHEAD_BLOCKS) for sequence in sequences])


def _has_work(turn: Turn | RunningTurn, batch: Batch) -> bool:
    return (turn.prefills and batch.waiting > 0) or (
        turn.decodes and len(batch.sequences) > batch.waiting + batch.beside
    )
