"""MuxWise's dispatcher: which share the decode gets, and what runs beside it."""

from __future__ import annotations

import pytest

from aegis.core.clock import NS_PER_MS
from aegis.core.ids import ModelId
from aegis.core.lane_views import Companion, Division, LanesView
from aegis.core.views import BatchView
from decode.policies.muxwise import MuxWise

MUXWISE = MuxWise()


def batch(number: int = 1, model: str = "a", *, tbt_ms: int = 50, gap_ms: int = 500) -> BatchView:
    return BatchView(number, ModelId(model), 10 * NS_PER_MS, tbt_ms * NS_PER_MS, 0, gap_ns=gap_ms * NS_PER_MS)


def prompt(of: BatchView, *steps_ms: int) -> Companion:
    """A prompt beside a decode that takes so long with a quarter, a half and three quarters."""
    shares = ((250, 750), (500, 500), (750, 250))
    divisions = [
        Division(pair, ms * NS_PER_MS, 400 * NS_PER_MS, 1.4) for pair, ms in zip(shares, steps_ms, strict=True)
    ]
    return Companion(of, True, 300 * NS_PER_MS, divisions)


def lanes(*companions: Companion, decoding: BatchView | None = None) -> LanesView:
    return LanesView(decoding or batch(), 10 * NS_PER_MS, companions)


def shares(policy: MuxWise, view: LanesView) -> tuple[int, int]:
    choice = policy.beside(view, 0)
    assert choice is not None
    return choice.shares


@pytest.mark.parametrize(
    ("steps_ms", "chosen"), [((40, 30, 20), (250, 750)), ((80, 50, 20), (500, 500)), ((90, 80, 70), (750, 250))]
)
def test_the_decode_gets_the_least_share_that_keeps_its_target_else_the_largest(
    steps_ms: tuple[int, int, int], chosen: tuple[int, int]
) -> None:
    assert shares(MUXWISE, lanes(prompt(batch(), *steps_ms))) == chosen


def test_the_gap_target_counts_where_it_is_the_stricter_one() -> None:
    decoding = batch(gap_ms=25)
    assert shares(MUXWISE, lanes(prompt(decoding, 40, 30, 20), decoding=decoding)) == (750, 250)


def test_another_model_does_not_run_beside_it() -> None:
    assert MUXWISE.beside(lanes(prompt(batch(2, "b"), 10, 10, 10)), 0) is None


def test_the_first_prompt_of_the_model_comes_first() -> None:
    """Its own batch's; another batch of the model may have one, too."""
    choice = MUXWISE.beside(
        lanes(prompt(batch(3, "b"), 9, 9, 9), prompt(batch(1), 9, 9, 9), prompt(batch(2), 9, 9, 9)), 0
    )
    assert choice and (choice.batch, choice.prefills) == (1, True)


def test_a_piece_takes_as_long_as_some_steps() -> None:
    choice = MuxWise(piece_steps=4, join_steps=8).beside(lanes(prompt(batch(), 40, 30, 20)), 0)
    assert choice and choice.within_ns == 160 * NS_PER_MS


def test_a_prompt_that_others_may_join_is_not_cut() -> None:
    choice = MuxWise(piece_steps=4, join_steps=10).beside(lanes(prompt(batch(), 40, 30, 20)), 0)
    assert choice and choice.within_ns == 400 * NS_PER_MS


def test_its_ablations() -> None:
    view = lanes(prompt(batch(), 90, 80, 40))
    assert shares(MuxWise(guarded=False), view) == (250, 750)
    assert shares(MuxWise(fixed=490), view) == (500, 500)
    choice = MuxWise(layer_wise=False).beside(view, 0)
    assert choice and choice.within_ns is None
