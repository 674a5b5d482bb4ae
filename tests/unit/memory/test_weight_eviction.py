"""Weights leave in the order that they are handed over, as few as will do, and each with who would have been next."""

from __future__ import annotations

from aegis.core.decision import Decision, DecisionKind, Why
from aegis.core.effects import UnmapWeights
from aegis.core.ids import InstanceId, ModelId, PageRun
from aegis.core.messages import GrantPages, TakeBack
from memory.ledger import Ledger
from memory.weight_eviction import WeightEviction
from tests.unit.memory.books import BUDGET, SPECS, WORDS

A, B, C, D = SPECS  # of 2, 3, 5 and 1 pages: of 12, one is left
NAMES = [spec.model for spec in SPECS]


class Noting:
    """Reasons that name the victim, who is spared, and for whom."""

    def weights(self, victim: ModelId, spared: ModelId | None, needed: ModelId | None) -> Decision:
        what = f"{victim} {spared} {needed}"
        return Decision(0, InstanceId("decode-0"), DecisionKind.EVICT, victim, (), what, Why(""))


def resident() -> tuple[Ledger, WeightEviction]:
    ledger = Ledger(BUDGET, WORDS, address_pages=100)
    ledger.balloon.granted(GrantPages((PageRun(0, BUDGET.pages),)))
    for spec in SPECS:
        ledger.add_model(spec)
        ledger.load(spec.model, ())
        ledger.weights.loaded(spec.model)
    ledger.drain()
    return ledger, WeightEviction(ledger, Noting())


def test_each_that_leaves_is_explained_by_who_would_have_been_next() -> None:
    ledger, weights = resident()
    weights.evict_all([A.model, C.model], B.model)
    a, b, c = A.model, B.model, C.model
    assert [each.what for each in ledger.drain() if isinstance(each, Decision)] == [f"{a} {c} {b}", f"{c} None {b}"]
    assert not ledger.weights.is_resident(a) and not ledger.weights.is_resident(c)


def test_only_those_that_had_to_leave_for_a_load_are_explained() -> None:
    ledger, weights = resident()
    weights.evict([B.model], 0, None)
    ledger.drain()
    assert weights.load(B.model, [A.model, C.model], spare=2)
    assert [each.what for each in ledger.drain() if isinstance(each, Decision)] == [f"{A.model} {C.model} {B.model}"]
    assert weights.abandon([B.model]) == 1 and weights.abandon([B.model]) == 0


def test_who_asks_gently_gets_pages_of_idle_models_as_far_as_asked() -> None:
    ledger, weights = resident()
    weights.give_back(TakeBack(1, 3, 0, gentle=True), [A.model, B.model], 0)
    left = [each.model for each in ledger.drain() if isinstance(each, UnmapWeights)]
    assert left == [A.model] and ledger.balloon.leaving == 3


def test_who_asks_gently_again_gets_no_weights_for_pages_that_are_to_be_kept() -> None:
    """Those of the first time are still being wiped."""
    ledger, weights = resident()
    for number in (1, 2):
        weights.give_back(TakeBack(number, 12, 0, gentle=True, keep=9), [A.model, B.model], 0)
    left = [each.model for each in ledger.drain() if isinstance(each, UnmapWeights)]
    assert left == [A.model] and ledger.balloon.staying == 9


def test_who_asks_otherwise_is_owed_them() -> None:
    ledger, weights = resident()
    weights.give_back(TakeBack(1, 3, 0), [A.model, B.model], 0)
    assert ledger.balloon.owes and list(ledger.weights.resident()) == NAMES
