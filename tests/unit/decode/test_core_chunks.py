"""The core of a mixed instance, scripted: long prefills are cut, and others run between two chunks."""

from __future__ import annotations

from collections.abc import Sequence

from aegis.core.block_runs import count_blocks, first_blocks
from aegis.core.effects import Run, Track, Untrack
from aegis.core.events import StepFailed, Stepped
from aegis.core.ids import RequestId
from aegis.core.messages import Broken, Cancel, GaveBack, GaveUp, Prefilled, Started, Submit, TakeBack
from aegis.core.model import ModelSpec
from aegis.core.request import Token
from aegis.core.views import BatchView, Renewal, Turn, TurnRules
from decode.core import DecodeCore
from tests.sim.driven import Driven, decode, make_job, sides
from tests.unit.decode.turns import IN, OUT, TWO_MODELS_FIT, WEIGHTS, WIDE, WIDE_2, A, B, beside, running, settle, take

CHUNK = 16
PATIENCE_NS = 40_000_000


class Cutting:
    """Turns of these batches in order, for ever, and chunks of one block, as there is no time for more; a plan is made
    after each of them."""

    rules = TurnRules(renewal=Renewal.ARRIVAL, chunk_tokens=CHUNK)

    def __init__(self, *order: int, free_until_ns: int | None = 0, decodes: bool = True) -> None:
        self.order = order
        self.prefills = True
        self.seen: list[tuple[BatchView, ...]] = []
        self._free_until_ns = free_until_ns
        self._decodes = decodes

    def plan(self, batches: Sequence[BatchView], now_ns: int) -> list[Turn]:
        self.seen.append(tuple(batches))
        return [Turn(batch, None, self._free_until_ns, self.prefills, self._decodes) for batch in self.order]


def chunked(driven: Driven[DecodeCore], duration_ns: int = 1_000_000) -> None:
    """A chunk that is not the last has run."""
    driven.on(Stepped((), duration_ns))


def prefills(driven: Driven[DecodeCore]) -> list[tuple[int, int, int]]:
    return [(run.job.request, run.start, run.stop) for run in driven.prompts()]


def first_chunk(
    policy: Cutting, *specs: ModelSpec, pages: int = TWO_MODELS_FIT, slabs: int | None = 64
) -> Driven[DecodeCore]:
    """Of request 1 of the first model."""
    driven = decode(*(specs or (A,)), pages=pages, slabs=slabs, policy=policy)
    driven.on(Submit(make_job(1, (specs or (A,))[0], prompt=40)))
    driven.complete(WEIGHTS)
    return driven


def test_a_prefill_is_cut_where_blocks_end_and_makes_a_token_at_its_end() -> None:
    driven = first_chunk(Cutting(1))
    (run,) = driven.prompts()
    assert prefills(driven) == [(1, 0, 16)] and count_blocks(run.blocks) == 1
    assert driven.said(Started) == [Started(RequestId(1), 1)]
    chunked(driven, 3)
    assert prefills(driven) == [(1, 16, 32)] and not driven.said(Started) and not driven.said(Prefilled)
    chunked(driven, 4)
    assert prefills(driven) == [(1, 32, 40)]
    driven.on(Stepped(((Token(5),),), 5))
    assert driven.said(Prefilled) == [Prefilled(RequestId(1), 1, Token(5), None, 3 + 4 + 5)]
    (row,) = driven.runs()[0].rows
    assert (row.index, row.token, row.start) == (1, 5, 40)
    counters = driven.core.counters
    assert (counters.prefills, counters.prompt_tokens) == (1, 40) and not driven.asked(Track, driven.effects)


def test_without_a_limit_or_a_rule_nothing_is_cut() -> None:
    assert prefills(first_chunk(Cutting(1, free_until_ns=None))) == [(1, 0, 40)]
    policy = Cutting(1)
    policy.rules = TurnRules(renewal=Renewal.ARRIVAL)
    assert prefills(first_chunk(policy)) == [(1, 0, 40)]


def test_who_decodes_has_a_token_in_the_step_of_each_chunk() -> None:
    driven = decode(A, pages=TWO_MODELS_FIT, policy=Cutting(1))
    take(driven, 1, A)
    settle(driven)
    driven.on(Submit(make_job(2, A, prompt=40)))
    driven.stepped(2)
    for number, chunk in enumerate(((2, 0, 16), (2, 16, 32), (2, 32, 40))):
        assert prefills(driven) == [chunk] and beside(driven) == [1]
        row = driven.asked(Run)[0].rows[1]
        assert (row.index, row.token, row.start) == (2 + number, 2, 11 + number)
        driven.ran()
    assert driven.said(Prefilled) == [Prefilled(RequestId(2), 1, Token(2), None, 3_000_000)]
    assert running(driven) == [1, 2] and driven.runs()[0].steps > 1
    assert driven.core.counters.generated_tokens == 1 + 3


def test_a_stream_whose_last_token_comes_beside_a_prompt_ends() -> None:
    driven = decode(A, pages=TWO_MODELS_FIT, policy=Cutting(1))
    take(driven, 1, A)
    settle(driven)
    driven.on(Submit(make_job(2, A, prompt=40)))
    driven.stepped(2)
    assert beside(driven) == [1]
    driven.ran(7)
    assert driven.asked(Untrack) == [Untrack(RequestId(1))]
    assert prefills(driven) == [(2, 16, 32)] and beside(driven) == []


def test_another_batch_may_have_its_turn_between_two_chunks() -> None:
    policy = Cutting(1)
    driven = first_chunk(policy, A, B)
    driven.on(Submit(make_job(2, B, prompt=10)))
    settle(driven)
    policy.order = (2, 1)
    chunked(driven)
    assert prefills(driven) == [(2, 0, 10)]
    driven.stepped(7)
    assert prefills(driven) == [(1, 16, 32)], "it goes on where it was"


def test_views_say_what_is_left() -> None:
    policy = Cutting(1)
    driven = first_chunk(policy)
    chunked(driven)
    (whole,), (rest,) = policy.seen
    assert (whole.waiting, rest.waiting) == (1, 1)
    assert rest.prefill_ns == driven.core._step_times.latency[A.model].prefill_ns(40, 16)
    assert rest.first_due_ns == whole.first_due_ns and rest.due_ns is None
    chunked(driven)
    driven.stepped(5)
    driven.on(Submit(make_job(2, A, prompt=40)))
    driven.stepped(5)
    (last,) = policy.seen[-1]
    assert (last.requests, last.waiting, last.due_ns) == ((1, 2), 1, A.slo.due_ns(0, 2))


def test_views_say_which_deadlines_can_be_met() -> None:
    """Or were missed by less than the time between two tokens."""
    due_ns = A.slo.due_ns(0, 2)
    for late_ns, savable_ns in ((-1, due_ns), (A.slo.tbt_ns - 1, due_ns), (A.slo.tbt_ns, None)):
        policy = Cutting(1)
        driven = decode(A, pages=TWO_MODELS_FIT, policy=policy)
        take(driven, 1, A)
        settle(driven)
        driven.on(Submit(make_job(2, A, prompt=40)))
        driven.stepped(2, after_ns=due_ns + late_ns - driven.now_ns)
        (view,) = policy.seen[-1]
        assert (view.due_ns, view.savable_due_ns) == (due_ns, savable_ns)


def test_who_is_prefilled_in_part_does_not_end_runs_of_a_turn_without_prefills() -> None:
    policy = Cutting(1)
    driven = decode(A, pages=TWO_MODELS_FIT, policy=policy)
    take(driven, 1, A)
    settle(driven)
    driven.on(Submit(make_job(2, A, prompt=40)))
    driven.stepped(2)
    assert prefills(driven) == [(2, 0, 16)]
    policy.prefills = False
    driven.ran()
    assert running(driven) == [1]
    assert not driven.on(Cancel(RequestId(9), 1))


def put_away(policy: Cutting) -> Driven[DecodeCore]:
    """The first two chunks of request 1 have run; then another model takes all of the device's memory."""
    driven = first_chunk(policy, WIDE, WIDE_2, pages=7)
    chunked(driven)
    driven.on(Submit(make_job(2, WIDE_2, prompt=40)))
    policy.order = (2, 1)
    chunked(driven)
    settle(driven)
    return driven


def test_what_is_there_of_a_sequence_is_put_away_and_comes_back() -> None:
    policy = Cutting(1)
    driven = put_away(policy)
    (out,) = [copy for copy in driven.copies if copy.stream is OUT]
    assert sum(count for _, _, count in out.copies) == 2, "what the last chunk would fill stays behind"
    assert prefills(driven) == [(2, 0, 16)]
    chunked(driven)
    chunked(driven)
    driven.stepped(7)
    settle(driven)
    (back,) = [copy for copy in driven.copies if copy.stream is IN]
    assert sides(back)[0] == sides(out)[1]
    (run,) = driven.prompts()
    assert prefills(driven) == [(1, 32, 40)]
    assert sides(back)[1] == first_blocks(run.blocks, 2) and count_blocks(run.blocks) == 3
    driven.stepped(5)
    assert running(driven) == [1]


def test_it_comes_back_in_a_turn_for_prefills_alone() -> None:
    policy = Cutting(1, decodes=False)
    driven = put_away(policy)
    for _ in range(2):
        chunked(driven)
    driven.stepped(7)
    settle(driven)
    assert prefills(driven) == [(1, 32, 40)]


def test_a_request_may_leave_between_and_during_chunks() -> None:
    for during in (True, False):
        driven = first_chunk(Cutting(1))
        if not during:
            chunked(driven)
        driven.on(Cancel(RequestId(1), 1))
        assert driven.asked(Untrack) == [Untrack(RequestId(1))]
        assert driven.core.ledger.device.use(), "the chunk under way still writes to its blocks"
        chunked(driven)
        assert not driven.core.ledger.device.use() and driven.core.queued == driven.core.running == 0
        assert not driven.said(Prefilled)


def test_a_failing_chunk_costs_its_own_request() -> None:
    driven = first_chunk(Cutting(1))
    driven.on(Submit(make_job(2, A, prompt=40)))
    chunked(driven)
    driven.on(StepFailed("broken"))
    assert driven.said(Broken) == [Broken(RequestId(1), 1, "broken")]
    assert prefills(driven) == [(2, 0, 16)]


def test_pages_may_be_taken_back_between_two_chunks() -> None:
    driven = first_chunk(Cutting(1), WIDE, pages=7)
    driven.on(TakeBack(1, 7, PATIENCE_NS))
    driven.on(Stepped((), PATIENCE_NS), after_ns=PATIENCE_NS // 2)
    settle(driven)
    (gave,) = driven.said(GaveBack, driven.effects)
    assert not gave.refused and not driven.said(GaveUp, driven.effects)
    assert sum(count for copy in driven.copies for _, _, count in copy.copies) == 1, "what is there is put away"


def test_without_a_slab_to_be_had_it_is_given_up_and_prefilled_again() -> None:
    policy = Cutting(1)
    driven = first_chunk(policy, WIDE, WIDE_2, pages=7, slabs=0)
    driven.on(Submit(make_job(2, WIDE_2, prompt=40)))
    policy.order = (2, 1)
    chunked(driven)
    settle(driven)
    assert driven.said(GaveUp, driven.effects) == [GaveUp(RequestId(1), 1)]
    assert prefills(driven) == [(2, 0, 16)]
