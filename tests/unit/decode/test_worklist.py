"""The work list: batches with room, rounds, turns."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from aegis.core.ids import ModelId
from aegis.core.model import ModelSpec
from aegis.core.views import MAX_BATCH, BatchView, Renewal, Turn, TurnRules
from aegis.sim.faults.fake_models import make_spec
from decode.sequences import Sequence
from decode.worklist import LOOKAHEAD_BLOCKS, PLAN_NS, Batch, WorkList
from tests.sim.driven import make_job

SPECS = [make_spec(i, image_pages=1, block_bytes=1024) for i in range(3)]
A, B, C = SPECS
QUOTA = 10


class EqualTurns:
    """In the list's order."""

    rules = TurnRules()

    def plan(self, batches: SequenceOf[BatchView], now_ns: int) -> list[Turn]:
        return [Turn(b.batch, QUOTA) for b in batches]


def view(batch: Batch) -> BatchView:
    return BatchView(batch.batch, batch.model, 1, 1, 1)


def sequence(request: int, spec: ModelSpec, *, cached: int = 16) -> Sequence:
    job = make_job(request, spec, prompt=cached, max_tokens=200)
    return Sequence(job, 1, 1, cached, spec, None)


def start(work: WorkList, now_ns: int) -> Batch | None:
    """The turn now, its first step beginning at once."""
    turn = work.turn_now(now_ns, view, lambda _: 1000)
    if turn and turn.started_ns is None:
        turn.started_ns = now_ns
    return turn.batch if turn else None


def models(batches: SequenceOf[Batch]) -> str:
    return "".join("ABC"[SPECS.index(next(s for s in SPECS if s.model == b.model))] for b in batches)


class InOrder(EqualTurns):
    rules = TurnRules(in_order=True, max_batch=2)


def test_in_order_only_the_last_batch_takes_newcomers_as_many_as_the_rules_allow() -> None:
    work = WorkList(InOrder())
    for request, spec in enumerate((A, A, A, B, A)):
        work.join(sequence(request, spec), 1000)
    assert [(batch.model, len(batch.sequences)) for batch in work.batches] == [
        (A.model, 2),
        (A.model, 1),
        (B.model, 1),
        (A.model, 1),
    ]


class AtArrivals(EqualTurns):
    rules = TurnRules(renewal=Renewal.ARRIVAL)


def test_a_new_plan_that_goes_on_with_a_batch_does_not_start_its_turn_anew() -> None:
    work = WorkList(AtArrivals())
    work.join(sequence(1, A), 1000)
    start(work, 5)
    work.join(sequence(2, B), 1000)
    assert work.outdated(9)
    start(work, 9)
    assert not work.outdated(9) and work.turn and work.turn.batch.model == A.model
    assert work.turn.ends_ns == 5 + QUOTA


class FirstAgain(EqualTurns):
    rules = TurnRules(renewal=Renewal.ARRIVAL)

    def __init__(self, forecast: bool) -> None:
        self._forecast = forecast

    def plan(self, batches: SequenceOf[BatchView], now_ns: int) -> list[Turn]:
        return [Turn(b.batch, QUOTA, forecast=self._forecast) for b in batches]


@pytest.mark.parametrize(("forecast", "model"), [(False, B.model), (True, A.model)])
def test_the_end_of_a_turn_makes_a_new_plan_where_the_rest_is_a_forecast(forecast: bool, model: ModelId) -> None:
    """The policy would have the first batch run next again."""
    work = WorkList(FirstAgain(forecast))
    for request, spec in enumerate((A, B)):
        work.join(sequence(request, spec), 1000)
    start(work, 5)
    turn = work.turn_now(5 + QUOTA, view, lambda _: 1000)
    assert turn and turn.batch.model == model


@pytest.mark.parametrize("forecast", [False, True])
def test_who_arrives_does_not_outdate_a_plan_that_sheds_before_it_was_worth_making(forecast: bool) -> None:
    work = WorkList(FirstAgain(forecast))
    for request, spec in enumerate((A, B)):
        work.join(sequence(request, spec), 1000)
    work.turn_now(5, view, lambda _: 1000)
    work.join(sequence(3, C), 1000)
    assert work.outdated(4 + 2 * PLAN_NS) is not forecast
    assert work.outdated(5 + 2 * PLAN_NS)
    work.cut()  # another batch may need the next step sooner
    assert work.outdated(5)


def test_a_turn_that_sheds_has_all_of_its_time_however_many_come_for_others() -> None:
    work = WorkList(FirstAgain(True))
    for request, spec in enumerate((A, B)):
        work.join(sequence(request, spec), 1000)
    turn = work.turn_now(5, view, lambda _: 1000)
    work.join(sequence(3, C), 1000)
    assert turn and work.outdated(5 + 3 * PLAN_NS), "nothing has run yet"
    turn.started_ns = 5
    assert not work.outdated(5 + 3 * PLAN_NS)
    work.join(sequence(4, A), 1000)
    assert work.outdated(5 + 3 * PLAN_NS), "what has come for its batch is to be done in its turn"


class NoTurns(EqualTurns):
    def plan(self, batches: SequenceOf[BatchView], now_ns: int) -> list[Turn]:
        return [Turn(b.batch, QUOTA, decodes=False) for b in batches]


def test_a_plan_in_which_nothing_can_be_done_is_a_bug() -> None:
    work = WorkList(NoTurns())
    work.join(sequence(1, A), 1000)
    with pytest.raises(AssertionError, match="plans nothing"):
        work.turn_now(0, view, lambda _: 1000)


def test_a_batch_takes_sequences_while_their_growth_fits() -> None:
    """Each is counted with what it has and room to grow: 1 + 4 blocks, so two fit into ten blocks and three do not."""
    work = WorkList(EqualTurns())
    for request in range(5):
        work.join(sequence(request, A), 2 * (1 + LOOKAHEAD_BLOCKS))
    assert [len(batch.sequences) for batch in work.batches] == [2, 2, 1]


def test_no_more_room_is_reserved_than_a_sequence_can_ever_use() -> None:
    short = Sequence(make_job(1, A, prompt=10, max_tokens=6), 1, 1, 10, A, None)
    assert (short.blocks_now(), short.blocks_ahead(LOOKAHEAD_BLOCKS)) == (1, 1)
    longer = Sequence(make_job(1, A, prompt=16, max_tokens=20), 1, 1, 16, A, None)
    assert (longer.blocks_now(), longer.blocks_ahead(LOOKAHEAD_BLOCKS)) == (2, 3)


def test_a_batch_is_full_with_so_many_sequences() -> None:
    work = WorkList(EqualTurns())
    for request in range(MAX_BATCH + 1):
        work.join(sequence(request, A), 10_000)
    assert [len(batch.sequences) for batch in work.batches] == [MAX_BATCH, 1]


def test_models_do_not_share_a_batch_and_a_left_batch_is_gone() -> None:
    work, (a, b) = WorkList(EqualTurns()), (sequence(1, A), sequence(2, B))
    work.join(a, 100)
    work.join(b, 100)
    assert models(work.batches) == "AB"
    work.leave(a)
    assert models(work.batches) == "B"


class Merging(EqualTurns):
    rules = TurnRules(max_batch=3, merges=True)


def two_batches(policy: EqualTurns) -> tuple[WorkList, Sequence]:
    """Of model A, three sequences and one; between their turns, one of model B. The first one, which is left later."""
    work = WorkList(policy)
    sequences = [sequence(request, spec) for request, spec in enumerate((A, A, A, B, A))]
    for each in sequences:
        work.join(each, 1000)
    assert requests(work) == [[0, 1, 2], [3], [4]]
    return work, sequences[0]


def requests(work: WorkList) -> list[list[int]]:
    return [[s.job.request for s in batch.sequences] for batch in work.batches]


def test_the_batch_that_is_given_the_turn_takes_over_the_others_of_its_model_that_fit() -> None:
    work, first = two_batches(Merging())
    start(work, 0)
    assert requests(work) == [[0, 1, 2], [3], [4]], "more than a batch may have"
    work.leave(first)
    assert start(work, 1) is work.batches[0] and len(work.batches) == 3, "the turn goes on as it was"
    start(work, QUOTA)
    assert start(work, 2 * QUOTA) is work.batches[-1]
    assert requests(work) == [[3], [4, 1, 2]]


def test_batches_stay_apart_where_their_growth_does_not_fit_or_the_rules_do_not_merge() -> None:
    for policy, capacity in ((Merging(), 2 * (1 + LOOKAHEAD_BLOCKS)), (InThrees(), 1000)):
        work, first = two_batches(policy)
        work.leave(first)
        for now_ns in range(0, 5 * QUOTA, QUOTA):
            work.turn_now(now_ns, view, lambda _, capacity=capacity: capacity)  # type: ignore[misc]
        assert requests(work) == [[1, 2], [3], [4]]


class InThrees(EqualTurns):
    rules = TurnRules(max_batch=3)


def test_who_waits_for_a_prefill_still_does_in_the_batch_that_takes_it_over() -> None:
    work, first = two_batches(Merging())
    work.leave(first)
    waits = work.batches[2].sequences[0]
    waits.lacks, work.batches[2].waiting = 3, 1
    start(work, 0)
    assert requests(work) == [[1, 2, 4], [3]] and work.batches[0].waiting == 1


def test_a_batch_of_which_a_run_is_under_way_on_the_second_lane_is_left_alone() -> None:
    work, first = two_batches(Merging())
    work.leave(first)
    work.begin_beside(work.batches[2], tuple(work.batches[2].sequences))
    start(work, 0)
    assert requests(work) == [[1, 2], [3], [4]]


def test_turns_go_round_and_last_as_long_as_their_quota() -> None:
    work = WorkList(EqualTurns())
    for request, spec in enumerate((A, B, C)):
        work.join(sequence(request, spec), 100)
    seen = [start(work, now) for now in range(0, 60, 5)]
    assert models([b for b in seen if b]) == "AABBCCAABBCC"


def test_the_quota_begins_with_the_first_step() -> None:
    """Bringing things in takes nothing from it."""
    work = WorkList(EqualTurns())
    for request, spec in enumerate((A, B)):
        work.join(sequence(request, spec), 100)
    turn = work.turn_now(0, view, lambda _: 1000)
    assert turn is not None and work.turn_now(1000, view, lambda _: 1000) is turn
    turn.started_ns = 1000
    assert work.turn_now(1000 + QUOTA - 1, view, lambda _: 1000) is turn
    assert work.turn_now(1000 + QUOTA, view, lambda _: 1000) is not turn


def test_who_comes_during_a_round_has_a_turn_in_the_next() -> None:
    work = WorkList(EqualTurns())
    for request, spec in enumerate((A, B)):
        work.join(sequence(request, spec), 100)
    first = start(work, 0)
    work.join(sequence(3, C), 100)
    seen = [first] + [start(work, now) for now in (10, 20, 30, 40)]
    assert models([b for b in seen if b]) == "ABABC"


def test_a_batch_that_ends_gives_its_turn_away() -> None:
    work, gone = WorkList(EqualTurns()), sequence(1, A)
    work.join(gone, 100)
    work.join(sequence(2, B), 100)
    work.join(sequence(3, C), 100)
    start(work, 0)
    work.leave(gone)
    work.leave(work.batches[0].sequences[0])
    assert models([b for b in [start(work, 1)] if b]) == "C"
    work.leave(work.batches[0].sequences[0])
    assert start(work, 2) is None and work.turn is None


def test_upcoming_is_the_order_of_turns() -> None:
    work = WorkList(EqualTurns())
    for request, spec in enumerate((A, B, C)):
        work.join(sequence(request, spec), 100)
    start(work, 0)
    assert models(work.upcoming()) == "ABC"
    start(work, 10)
    assert models(work.upcoming()) == "BCA"
    start(work, 20)
    assert models(work.upcoming()) == "CAB"


class Rounds(RuleBasedStateMachine):
    """Nobody is left out, whoever comes and goes."""

    def __init__(self) -> None:
        super().__init__()
        self.work = WorkList(EqualTurns())
        self.now_ns = 0
        self.requests = 0
        self.most = 0
        self.waited: dict[int, int] = {}  # turns of others since its own

    @rule(spec=st.sampled_from(SPECS))
    def join(self, spec: ModelSpec) -> None:
        self.requests += 1
        self.work.join(sequence(self.requests, spec), 2 * (1 + LOOKAHEAD_BLOCKS))
        self.most = max(self.most, len(self.work.batches))

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if self.work.batches:
            batch = data.draw(st.sampled_from(self.work.batches))
            self.work.leave(data.draw(st.sampled_from(batch.sequences)))

    @rule(ns=st.integers(0, 15))
    def go_on(self, ns: int) -> None:
        self.now_ns += ns
        before = self.work.turn
        batch = start(self.work, self.now_ns)
        assert (batch is None) == (not self.work.batches)
        if batch is None or self.work.turn is before:
            return
        self.waited = {b.batch: self.waited.get(b.batch, 0) + 1 for b in self.work.batches}
        self.waited[batch.batch] = 0

    @invariant()
    def no_batch_is_empty_or_too_large(self) -> None:
        for batch in self.work.batches:
            assert 0 < len(batch.sequences) <= 2
            assert all(s.job.model == batch.model for s in batch.sequences)

    @invariant()
    def everyone_has_a_turn_within_two_rounds(self) -> None:
        assert all(turns < 2 * self.most for turns in self.waited.values())

    @invariant()
    def upcoming_names_each_batch_once(self) -> None:
        upcoming = [batch.batch for batch in self.work.upcoming()]
        assert sorted(upcoming) == sorted(batch.batch for batch in self.work.batches)


Rounds.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestRounds = Rounds.TestCase
