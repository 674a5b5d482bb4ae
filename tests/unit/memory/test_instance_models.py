"""Models come to an instance and leave it when nothing of theirs is in use, and what is said follows what is done."""

from __future__ import annotations

from aegis.core.effects import Bind, Send, StreamName, Unbind, Untrack
from aegis.core.events import LoadFailed
from aegis.core.ids import PageRun, RequestId
from aegis.core.messages import FromInstance, GrantPages, ImageUnreadable, ModelAdded, ModelDropped, ModelFailed
from memory.effect_list import EffectList
from memory.instance_models import InstanceModels
from memory.ledger import Ledger
from tests.unit.memory.books import BUDGET, SPECS, WORDS

A, B, C = SPECS[:3]


class Told:
    """An instance's models, on books of its own with room for `address_pages` of weights."""

    def __init__(self, *, address_pages: int = 100) -> None:
        self.ledger = Ledger(BUDGET, WORDS, address_pages=address_pages)
        self.ledger.balloon.granted(GrantPages((PageRun(0, BUDGET.pages),)))
        self.effects = EffectList(self.ledger)
        self.models = InstanceModels(self.ledger, self.effects.send)

    def said(self) -> list[FromInstance]:
        return [effect.message for effect in self.effects.take() if isinstance(effect, Send)]

    def arrived(self) -> None:
        """The load that is under way has ended, and A runs."""
        self.ledger.progress(StreamName.WEIGHTS, 1)
        self.models.active = A.model


def test_memory_effects_go_before_the_message_that_relies_on_them() -> None:
    told = Told()
    told.effects.take()
    told.effects.append(Untrack(RequestId(1)))
    assert told.models.add(A)
    told.effects.flush()
    kinds = [type(effect) for effect in told.effects.take()]
    assert kinds[-2:] == [Bind, Send] and kinds[0] is Untrack
    assert told.effects.take() == []


def test_a_model_for_which_there_is_no_address_space_is_refused_and_can_be_dropped() -> None:
    told = Told(address_pages=2)
    assert told.models.add(A) and not told.models.add(B)
    assert told.said() == [ModelAdded(A.model), ModelFailed(B.model, "no address space is left")]
    told.models.drop(B.model)
    assert told.said() == [ModelDropped(B.model)] and not told.models.dropping


def test_a_model_that_is_in_use_or_being_loaded_is_dropped_later() -> None:
    told = Told()
    for spec in (A, B, C):
        told.models.add(spec)
    told.ledger.load(A.model, ())
    for spec in (C, B, A):
        told.models.drop(spec.model)
    told.said()
    assert told.models.drop_unused({B.model}) == [C.model]
    assert told.said() == [ModelDropped(C.model)]
    told.arrived()
    assert told.models.drop_unused(set()) == [A.model, B.model] and not told.models.dropping
    assert told.models.active is None
    assert [type(effect) for effect in told.effects.take()][-2:] == [Unbind, Send]


def test_none_is_active_once_its_weights_have_left() -> None:
    told = Told()
    told.models.add(A)
    told.ledger.load(A.model, ())
    told.arrived()
    told.models.check_active()
    assert told.models.active == A.model
    told.ledger.evict(A.model)
    assert told.models.active == A.model
    told.models.check_active()
    assert told.models.active is None


def test_an_image_that_could_not_be_read_is_reported() -> None:
    told = Told()
    told.models.add(A)
    told.ledger.load(A.model, ())
    told.said()
    told.models.load_failed(LoadFailed(A.model, "it is cut short"))
    assert told.said() == [ImageUnreadable(A.model, "it is cut short")]
    assert told.ledger.weights.is_abandoned(A.model)
