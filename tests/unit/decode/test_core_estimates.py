"""The lessons of a decode core for its estimates of steps."""

from __future__ import annotations

from aegis.core.clock import NS_PER_S
from aegis.core.events import Stepped
from aegis.core.messages import StepsTook
from aegis.core.request import Token
from tests.unit.decode.turns import TWO_MODELS_FIT, A, lent, settle, take


def test_a_run_of_several_steps_counts_the_context_that_it_makes_itself() -> None:
    """On average over its steps: each row has had half of the tokens it is given in them."""
    driven = lent(A, pages=TWO_MODELS_FIT)
    take(driven, 1, A, prompt=10)
    take(driven, 2, A, prompt=10)
    settle(driven)
    driven.stepped(*[2] * len(driven.runs(driven.effects)[-1].rows))
    rows = driven.runs(driven.effects)[-1].rows
    assert len(rows) == 2
    cached = sum(row.start for row in rows)
    steps = tuple(tuple(Token(2) for _ in rows) for _ in range(5))
    driven.on(Stepped(steps, NS_PER_S), after_ns=2 * NS_PER_S)
    (took,) = driven.said(StepsTook)
    assert (took.rows, took.context_tokens) == (2, cached + 2 * 4 // 2)
