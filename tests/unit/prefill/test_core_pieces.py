"""The prefill core, scripted: a long prompt is run in pieces, and short ones come between them."""

from __future__ import annotations

from aegis.core.block_runs import count_blocks
from aegis.core.effects import Untrack
from aegis.core.events import StepFailed, Stepped
from aegis.core.ids import RequestId
from aegis.core.messages import (
    AddModel,
    Broken,
    Cancel,
    DropModel,
    ModelDropped,
    Prefilled,
    Started,
    Submit,
    SwitchDone,
)
from aegis.core.model import ModelSpec, Slo
from aegis.core.request import Token
from aegis.sim.faults.fake_models import PAGE, make_spec
from prefill.core import PrefillCore
from prefill.policies.least_slack import LeastSlackPrefill
from tests.sim.driven import Driven, make_job, prefill
from tests.unit.prefill.jobs import OUT, loaded

GAP = Slo(gap_ns=2_000_000)
A, B = (make_spec(index, image_pages=3, block_bytes=PAGE // 64, slo=GAP) for index in range(2))
LONG = 300  # tokens, of which 96 are believed to take less than 2 ms


def pieces(driven: Driven[PrefillCore]) -> list[tuple[int, int, int]]:
    return [(run.job.request, run.start, run.stop) for run in driven.prompts()]


def ran(driven: Driven[PrefillCore], token: int | None = None) -> None:
    """The run under way, as long as it was believed to take. It makes a token if it is the last of its job."""
    run = driven.prompts(driven.effects)[-1]
    steps = () if token is None else ((Token(token),),)
    driven.on(Stepped(steps, 1_000_000 + 10_000 * (run.stop - run.start)))


def used(driven: Driven[PrefillCore]) -> int:
    """Blocks on the device."""
    return sum(
        shape.used_blocks + shape.reserved_blocks for shape in driven.core.ledger.shapes() if shape.region == "device"
    )


def submit(driven: Driven[PrefillCore], request: int, spec: ModelSpec, prompt: int, *, arrival_ns: int = 0) -> None:
    driven.on(Submit(make_job(request, spec, prompt=prompt, arrival_ns=arrival_ns), request))


def long_one(*others: ModelSpec, pages: int = 40) -> Driven[PrefillCore]:
    """Request 1, whose first piece runs. The models of others were brought in before it came."""
    driven = prefill(A, *others, pages=pages, policy=LeastSlackPrefill())
    for number, spec in enumerate((*others, A), 100):
        submit(driven, number, spec, 10)
        loaded(driven)
        ran(driven, 1)
        driven.complete(OUT)
    submit(driven, 1, A, LONG)
    return driven


def test_a_prompt_is_cut_where_blocks_end_and_handed_over_whole() -> None:
    driven = long_one()
    assert pieces(driven) == [(1, 0, 96)] and driven.said(Started) == [Started(RequestId(1), 1)]
    assert count_blocks(driven.prompts()[0].blocks) == 6
    for stop in (192, 288, LONG):
        ran(driven)
        assert pieces(driven)[0][2] == stop and not driven.said(Started) and not driven.said(Prefilled)
    assert not driven.asked(Untrack)
    ran(driven, 5)
    (done,) = driven.said(Prefilled)
    assert done.kv and done.kv.tokens == LONG and done.duration_ns == 3 * 1_960_000 + 1_120_000
    assert (driven.core.counters.prefills, driven.core.counters.prompt_tokens) == (2, 10 + LONG)


def test_without_an_order_nothing_is_cut() -> None:
    driven = prefill(A, pages=40)
    submit(driven, 1, A, LONG)
    loaded(driven)
    assert pieces(driven) == [(1, 0, LONG)]


def test_a_short_prompt_comes_between_two_pieces() -> None:
    """Another one that is cut itself does not, nor one that came later than the long one takes."""
    driven = long_one()
    submit(driven, 2, A, LONG)
    submit(driven, 3, A, 20)
    submit(driven, 4, A, 20, arrival_ns=3_900_000)
    ran(driven)
    assert pieces(driven) == [(3, 0, 20)] and driven.said(Started) == [Started(RequestId(3), 1)]
    assert (driven.core.running, driven.core.queued) == (2, 2)
    ran(driven, 1)
    assert [message.request for message in driven.said(Prefilled)] == [3]
    assert pieces(driven) == [(1, 96, 192)] and not driven.said(Started)


def test_a_short_prompt_of_another_model_comes_if_its_weights_are_there() -> None:
    driven = long_one(B)
    submit(driven, 2, B, 20)
    ran(driven)
    assert pieces(driven) == [(2, 0, 20)]
    assert driven.core.active == B.model and [done.model for done in driven.said(SwitchDone)] == [B.model]
    ran(driven, 1)
    assert pieces(driven) == [(1, 96, 192)] and driven.core.active == A.model
    away = long_one(pages=40)
    away.on(AddModel(B))
    submit(away, 2, B, 20)
    ran(away)
    assert pieces(away) == [(1, 96, 192)]


def test_a_model_with_a_prompt_in_pieces_is_not_dropped() -> None:
    driven = long_one(B)
    submit(driven, 2, B, 20)
    ran(driven)
    driven.on(DropModel(A.model))
    assert not driven.said(ModelDropped)


def test_whoever_leaves_during_a_piece_frees_all_it_had() -> None:
    driven = long_one()
    driven.on(Cancel(RequestId(1), 1))
    assert not driven.asked(Untrack)
    ran(driven)
    assert [effect.request for effect in driven.asked(Untrack)] == [1] and not pieces(driven)
    assert (driven.core.running, used(driven)) == (0, 0)


def test_whoever_leaves_between_pieces_frees_all_it_had() -> None:
    driven = long_one()
    submit(driven, 2, A, 20)
    ran(driven)
    driven.on(Cancel(RequestId(1), 1))
    ran(driven, 1)
    assert [effect.request for effect in driven.asked(Untrack)] == [2, 1] and not pieces(driven)
    driven.complete(OUT)
    assert (driven.core.running, used(driven)) == (0, 0)


def test_a_piece_that_fails_costs_its_own_request() -> None:
    driven = long_one()
    submit(driven, 2, A, 20)
    driven.on(StepFailed("no"))
    assert [message.request for message in driven.said(Broken)] == [1]
    assert pieces(driven) == [(2, 0, 20)]
