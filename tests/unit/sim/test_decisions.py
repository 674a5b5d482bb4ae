"""Explanations of every recipe, in a small simulation: complete, and without any influence."""

from __future__ import annotations

from dataclasses import replace

import pytest

from aegis.core.decision import Decision, DecisionKind
from aegis.core.ids import ModelId
from aegis.policies import RECIPES, recipe
from aegis.sim.gpu_costs import gpu
from aegis.sim.market import SimRequest
from aegis.sim.simulation import Outcome, Pool, simulate
from aegis.telemetry.spans import SpanKind
from tests.unit.sim.test_recipes import MODELS, SPECS

ARRIVALS = [SimRequest(10**8 * (i // 4), SPECS[i * 5 % MODELS].model, 200, 60) for i in range(48)]


def play(name: str, *, explains: bool, mixed: bool) -> Outcome:
    pool = Pool(recipe=recipe(name), gpu=gpu("h800"), specs=SPECS, keep_spans=True, explains=explains)
    return simulate(replace(pool, mixed=3) if mixed else replace(pool, prefills=1, decodes=2), ARRIVALS)


def of(decisions: list[Decision], kind: DecisionKind) -> list[Decision]:
    return [each for each in decisions if each.kind is kind]


def turned(decisions: list[Decision]) -> set[ModelId]:
    """Who comes to a batch during its turn is in none that was given, so requests are not asked for."""
    return {each.model for each in of(decisions, DecisionKind.TURN)}


@pytest.mark.parametrize("mixed", [True, False], ids=["mixed", "split"])
@pytest.mark.parametrize("name", RECIPES)
def test_whatever_is_decided_has_a_reason_and_nothing_else_changes(name: str, mixed: bool) -> None:
    told, silent = (play(name, explains=explains, mixed=mixed) for explains in (True, False))
    assert (told.records, told.spans, told.counters) == (silent.records, silent.spans, silent.counters)
    assert silent.decisions == []
    served = {record.request for record in told.records if record.ended == "finished"}
    placed = [request for each in of(told.decisions, DecisionKind.PLACE) for request in each.requests]
    assert served <= set(placed)
    assert {each.model for each in told.spans if each.kind is SpanKind.DECODE} <= turned(told.decisions)
    if not mixed:
        assert served <= {request for each in of(told.decisions, DecisionKind.PREFILL) for request in each.requests}
    assert all(each.why.because and "\n" not in each.line for each in told.decisions)
    assert [each.at_ns for each in told.decisions] == sorted(each.at_ns for each in told.decisions)
