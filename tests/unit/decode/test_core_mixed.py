"""The core of a mixed instance, scripted: what is submitted is prefilled in its batch's turn and goes on there."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp

import pytest

from aegis.core.block_runs import count_blocks
from aegis.core.effects import CopyBlocks, EndRun, Track, Untrack
from aegis.core.events import StepFailed, Stepped
from aegis.core.ids import PageRun, RequestId
from aegis.core.messages import (
    Broken,
    Cancel,
    GaveUp,
    GrantPages,
    NeedPages,
    Phase,
    Prefilled,
    PromptLogprobs,
    Started,
    Submit,
    Tokens,
)
from aegis.core.model import ModelSpec, Slo
from aegis.core.request import Token
from aegis.core.views import ANSWER_TOKENS, BatchView, Renewal, Turn, TurnRules
from aegis.sim.faults.fake_models import PAGE, make_spec
from decode.core import DecodeCore
from tests.sim.driven import Driven, decode, make_job
from tests.unit.decode.turns import IN, OUT, TWO_MODELS_FIT, WEIGHTS, WIDE, A, B, lent, running, settle, step, take


class Planned:
    """Turns as the test says: `(batch, prefills, decodes)`, for ever."""

    def __init__(self, *turns: tuple[int, bool, bool], rules: TurnRules | None = None) -> None:
        self.turns = turns
        self.rules = rules or TurnRules()
        self.seen: list[tuple[BatchView, ...]] = []

    def plan(self, batches: Sequence[BatchView], now_ns: int) -> list[Turn]:
        self.seen.append(tuple(batches))
        return [Turn(batch, None, prefills=prefills, decodes=decodes) for batch, prefills, decodes in self.turns]


def submit(driven: Driven[DecodeCore], request: int, spec: ModelSpec, **sizes: int) -> None:
    driven.on(Submit(make_job(request, spec, **sizes)))


def prefilling(driven: Driven[DecodeCore]) -> list[int]:
    return [run.job.request for run in driven.prompts()]


def loaded(policy: Planned | None = None) -> Driven[DecodeCore]:
    """Request 1 of A is being prefilled."""
    driven = decode(A, B, pages=TWO_MODELS_FIT, policy=policy)
    submit(driven, 1, A, prompt=20)
    driven.complete(WEIGHTS)
    return driven


def test_a_submitted_sequence_is_prefilled_and_goes_on_where_it_is() -> None:
    driven = loaded()
    (run,) = driven.prompts()
    assert count_blocks(run.blocks) == A.manifest.kv.blocks_for(20)
    assert driven.said(Started) == [Started(RequestId(1), 1)] and not driven.asked(Track, driven.effects)
    driven.stepped(5)
    (prefilled,) = driven.said(Prefilled)
    assert (prefilled.token, prefilled.kv) == (Token(5), None)
    assert driven.said(Phase) == [Phase((RequestId(1),), running=True)]
    (row,) = driven.runs()[0].rows
    assert (row.index, row.token, row.start) == (1, 5, 20)
    assert not driven.asked(CopyBlocks, driven.effects)


def test_a_turn_that_prefills_asks_for_what_its_prefill_lacks() -> None:
    """However little the one needs who decodes and comes first in the batch."""
    policy = Planned((1, False, True), rules=TurnRules(renewal=Renewal.ARRIVAL))
    driven = lent(WIDE, pages=4, policy=policy)
    take(driven, 1, WIDE)
    policy.turns = ((1, True, False),)
    submit(driven, 2, WIDE, prompt=17)
    driven.complete(WEIGHTS)
    driven.complete(IN)
    driven.on(GrantPages((), refused=True))
    settle(driven)
    assert driven.said(NeedPages) == [NeedPages(1, urgent=True)]
    driven.on(GrantPages((PageRun(4, 5),)))
    assert prefilling(driven) == [2]


def test_policies_see_deadlines_of_the_model_shifted_by_priority() -> None:
    """Which count in deadlines of the model; whether a token can still be on time is another matter."""
    ttft_ns, tbt_ns = 2_000_000_000, 100_000_000
    hasty = make_spec(5, image_pages=3, block_bytes=PAGE // 4, slo=Slo(ttft_ns, tbt_ns))
    policy = Planned((1, True, True), rules=TurnRules(renewal=Renewal.ARRIVAL, chunk_tokens=16))
    driven = decode(hasty, pages=TWO_MODELS_FIT, policy=policy)
    take(driven, 1, hasty)
    driven.on(Submit(make_job(2, hasty, priority=3)))
    driven.on(Submit(make_job(3, hasty, priority=-2)))
    (view,) = policy.seen[-1]
    assert (view.ttft_ns, view.tbt_ns) == (ttft_ns, tbt_ns)
    assert view.due_ns == view.savable_due_ns == ttft_ns + tbt_ns
    assert view.first_due_ns == -ttft_ns


def test_views_say_what_a_batch_is_worth() -> None:
    """Who is late counts less, and priority doubles; it says who comes first, and not who is late."""
    ttft_ns, tbt_ns = 2_000_000_000, 100_000_000
    hasty = make_spec(5, image_pages=3, block_bytes=PAGE // 4, slo=Slo(ttft_ns, tbt_ns))
    policy = Planned((1, True, True), rules=TurnRules(renewal=Renewal.ARRIVAL, sheds=True))
    driven = decode(hasty, pages=TWO_MODELS_FIT, policy=policy)
    take(driven, 1, hasty)
    (view,) = policy.seen[-1]
    lead_ns = view.step_ns + view.switch_ns
    assert (view.in_time_by_ns, view.worth) == (ttft_ns + tbt_ns - lead_ns, 1.0)
    driven.on(Submit(make_job(2, hasty, priority=-2)))
    (view,) = policy.seen[-1]
    by_ns = -ttft_ns - view.prefill_ns - view.step_ns
    assert (view.in_time_by_ns, view.worth) == (by_ns, 1 + 4), "the weights are on their way"
    driven.now_ns = 2 * ttft_ns
    driven.on(Submit(make_job(3, hasty)))
    (view,) = policy.seen[-1]
    assert view.first_due_ns == -ttft_ns and view.in_time_by_ns is None
    past_ns = driven.now_ns - ttft_ns
    late_ns = [past_ns - tbt_ns, past_ns + view.prefill_ns, past_ns + view.prefill_ns]
    catches_up = [(ns + view.step_ns) / (tbt_ns - view.step_ns) for ns in late_ns]
    expected = [exp(-tokens / ANSWER_TOKENS) for tokens in catches_up]
    assert view.worth == pytest.approx(expected[0] + 4 * expected[1] + expected[2])


def test_who_is_late_is_worth_less_of_a_model_whose_answers_are_short() -> None:
    """The first answer here has two tokens, one of them made by its prefill elsewhere."""
    slo = Slo(2_000_000_000, 100_000_000)
    hasty = make_spec(5, image_pages=3, block_bytes=PAGE // 4, slo=slo)
    policy = Planned((1, True, True), (2, True, True), rules=TurnRules(renewal=Renewal.ARRIVAL, sheds=True))
    driven = decode(hasty, pages=TWO_MODELS_FIT, policy=policy)
    take(driven, 1, hasty, max_tokens=2)
    settle(driven)
    step(driven)
    driven.now_ns = 2 * slo.ttft_ns
    take(driven, 2, hasty)
    (view,) = policy.seen[-1]
    assert view.late_ns == pytest.approx(slo.ttft_ns - slo.tbt_ns + view.step_ns, rel=1e-3)
    tokens = (slo.ttft_ns - slo.tbt_ns + view.step_ns) / (slo.tbt_ns - view.step_ns)
    assert view.worth == pytest.approx(exp(-tokens / ((4 * ANSWER_TOKENS + 1) / 5)), rel=1e-3)


@pytest.mark.parametrize("defers", [False, True])
def test_who_was_refused_room_may_wait_until_others_of_its_batch_need_a_turn(defers: bool) -> None:
    """Or its batch would have turn after turn for it, in which it brings its other sequences on."""
    rules = TurnRules(renewal=Renewal.ARRIVAL, chunk_tokens=16, defers_refused=defers)
    policy = Planned((1, True, True), rules=rules)
    driven = lent(WIDE, B, pages=4, policy=policy)
    take(driven, 1, WIDE)
    settle(driven)
    submit(driven, 2, WIDE)
    assert step(driven) == [1], "one block is all that there is room for"
    driven.on(GrantPages((), refused=True))
    assert step(driven) == [1]
    policy.turns = ((2, True, True), (1, True, True))
    submit(driven, 3, B)
    step(driven)
    driven.on(GrantPages((PageRun(4, 8),)))
    settle(driven)
    submit(driven, 4, B)
    driven.stepped(5)
    first, second = policy.seen[-1]
    assert (first.waiting, second.waiting) == (1, 1) and first.due_ns is not None
    assert (first.first_due_ns is None) is defers
    assert second.first_due_ns is not None


def test_a_replay_is_prefilled_with_the_tokens_that_were_sent() -> None:
    driven = decode(A, pages=TWO_MODELS_FIT)
    driven.on(Submit(make_job(1, A, prompt=10, sent=(3, 4), attempt=2)))
    driven.complete(WEIGHTS)
    driven.stepped(5)
    (row,) = driven.runs()[0].rows
    assert (row.index, row.token, row.start) == (3, 5, 12)


def test_the_first_token_may_be_the_last() -> None:
    driven = loaded()
    driven.stepped(7)
    (tokens,) = driven.said(Tokens)
    assert (tokens.first, tokens.tokens, tokens.finish) == (0, (Token(7),), "stop")
    assert driven.asked(Untrack) == [Untrack(RequestId(1))] and not driven.said(Prefilled)
    assert not driven.core.ledger.device.use()


def test_the_prompts_logprobs_come_before_the_first_token() -> None:
    driven = loaded()
    driven.on(Stepped(((Token(5),),), 1_000_000, (Token(1),)))
    kinds = [type(message) for message in driven.said(PromptLogprobs | Prefilled)]  # type: ignore[arg-type]
    assert kinds == [PromptLogprobs, Prefilled]


def test_a_newcomer_ends_the_run_of_its_batch_and_is_prefilled_next() -> None:
    driven = loaded()
    driven.stepped(5)
    submit(driven, 2, A)
    assert driven.asked(EndRun) == [EndRun()]
    driven.stepped(5)
    assert prefilling(driven) == [2]
    driven.stepped(5)
    assert running(driven) == [1, 2]


def test_who_is_adopted_decodes_beside_who_was_prefilled() -> None:
    driven = loaded()
    driven.stepped(5)
    take(driven, 2, A)
    settle(driven)
    driven.stepped(5)
    assert running(driven) == [1, 2]


def test_a_failing_prefill_costs_its_own_request() -> None:
    driven = loaded()
    driven.on(StepFailed("broken"))
    assert driven.said(Broken) == [Broken(RequestId(1), 1, "broken")]
    assert not driven.core.ledger.device.use() and driven.core.queued == driven.core.running == 0


def test_a_request_may_leave_before_and_during_its_prefill() -> None:
    driven = loaded()
    submit(driven, 2, A)
    driven.on(Cancel(RequestId(2), 1))
    driven.on(Cancel(RequestId(1), 1))
    assert driven.core.ledger.device.use(), "the prefill still writes to its blocks"
    driven.stepped(5)
    assert not driven.said(Prefilled) and not driven.core.ledger.device.use()


def test_views_say_what_waits() -> None:
    policy = Planned((1, True, True), (2, True, True), rules=TurnRules(renewal=Renewal.TURN))
    driven = loaded(policy)
    submit(driven, 2, A, prompt=30)
    submit(driven, 3, B, prompt=40)
    driven.stepped(7)
    driven.stepped(7)
    (waiting,) = policy.seen[0]
    assert (waiting.requests, waiting.waiting, waiting.active) == ((1,), 1, False)
    assert waiting.first_due_ns == A.slo.ttft_ns
    (left,) = policy.seen[-1]
    assert (left.model, left.requests, left.waiting, left.decoded_ns) == (B.model, (3,), 1, -1)


def test_a_turn_may_be_for_prefills_alone() -> None:
    driven = loaded(Planned((1, True, False), (2, True, False), (1, False, True), (2, False, True)))
    submit(driven, 2, B)
    driven.stepped(5)
    settle(driven)
    assert prefilling(driven) == [2], "A does not decode before B is prefilled"
    driven.stepped(5)
    assert running(driven) == [1]


def test_a_prefill_gets_the_room_of_who_decoded_in_its_batch() -> None:
    rules = TurnRules(renewal=Renewal.ARRIVAL)
    driven = lent(WIDE, pages=4, policy=Planned((1, True, False), (1, False, True), rules=rules))
    driven.refusing = True
    submit(driven, 1, WIDE)
    driven.complete(WEIGHTS)
    driven.stepped(5)
    submit(driven, 2, WIDE)
    driven.stepped(5)
    driven.complete(OUT)
    assert prefilling(driven) == [2], "request 1 is not brought in again before"
    driven.stepped(7)
    driven.complete(IN)
    assert running(driven) == [1]


def test_an_arrival_may_preempt_the_run() -> None:
    driven = loaded(Planned((2, True, False), (1, True, True), rules=TurnRules(renewal=Renewal.ARRIVAL)))
    driven.stepped(5)
    assert running(driven) == [1]
    submit(driven, 2, B)
    assert driven.asked(EndRun)
    driven.stepped(5)
    assert driven.said(Phase, driven.effects)[-1] == Phase((RequestId(1),), running=False)
    settle(driven)
    assert prefilling(driven) == [2]
    driven.stepped(5)
    assert running(driven) == [1], "whose KV stayed"


def test_a_turn_without_end_lasts_until_the_batch_is_empty() -> None:
    driven = loaded(Planned((1, True, True), (2, True, True), rules=TurnRules(renewal=Renewal.TURN)))
    submit(driven, 2, B)
    driven.stepped(5)
    for _ in range(20):
        assert running(driven) == [1]
        driven.stepped(5, after_ns=10**9)
    driven.stepped(7)
    settle(driven)
    assert prefilling(driven) == [2]


def test_who_is_preempted_may_have_to_give_its_kv_up() -> None:
    rules = TurnRules(renewal=Renewal.ARRIVAL, keeps_kv=False)
    driven = loaded(Planned((2, True, True), (1, True, True), rules=rules))
    driven.stepped(5)
    submit(driven, 2, B)
    driven.stepped(5)
    assert driven.said(GaveUp) == [GaveUp(RequestId(1), 1)]


def test_without_prefetching_the_next_model_comes_in_its_turn() -> None:
    for prefetches in (True, False):
        driven = loaded(Planned((1, True, True), (2, True, True), rules=TurnRules(prefetches=prefetches)))
        submit(driven, 2, B)
        driven.stepped(5)
        assert (B.model in driven.loads) is prefetches


def test_where_nothing_is_evicted_who_does_not_fit_waits_while_anything_else_can_go_on() -> None:
    driven = decode(A, B, pages=5, policy=Planned((1, True, True), (2, True, True), rules=TurnRules(evicts=False)))
    submit(driven, 1, A)
    driven.complete(WEIGHTS)
    submit(driven, 2, B)
    driven.stepped(2)
    assert driven.loads == [A.model] and running(driven) == [1]
    driven.stepped(7)
    assert driven.loads == [A.model, B.model], "for ever, otherwise"
