"""The requests that wait for their grammar, and the order in which the core gets them."""

from __future__ import annotations

import pytest

from aegis.core.events import InstanceEvent
from aegis.core.ids import InstanceId, ModelId, ProxyId, RequestId
from aegis.core.messages import Cancel, DropProxy, ForgetPeer, HandOver, Submit
from aegis.core.request import Grammar, Job, Sampling
from aegis.instance.grammar_wait import GrammarWait

GRAMMAR = Grammar("regex", "a")


class Compiling:
    """Of an engine what is asked here: its grammars are compiled when `done` says so."""

    def __init__(self) -> None:
        self.done = False

    def ready(self, model: ModelId, sampling: Sampling) -> bool:
        return self.done or sampling.grammar is None


def submit(request: int, grammar: Grammar | None = GRAMMAR) -> Submit:
    sampling = Sampling(max_tokens=1, grammar=grammar)
    return Submit(Job(RequestId(request), 0, ModelId("m"), (1,), sampling, 0))


def heard(wait: GrammarWait, *events: InstanceEvent) -> list[InstanceEvent]:
    return [passed for event in events for passed in wait.passed(event)]


def test_only_what_has_a_grammar_waits_and_until_it_is_compiled() -> None:
    engine = Compiling()
    wait = GrammarWait(engine)
    assert heard(wait, submit(1), submit(2, None), submit(3)) == [submit(2, None)]
    assert wait.waiting and wait.ready() == []
    engine.done = True
    assert wait.ready() == [submit(1), submit(3)]
    assert not wait.waiting and wait.ready() == []
    assert heard(wait, submit(4)) == [submit(4)]


@pytest.mark.parametrize("event", [Cancel(RequestId(1), 0), HandOver(RequestId(1), 0)])
def test_a_request_is_heard_of_before_its_end(event: Cancel | HandOver) -> None:
    wait = GrammarWait(Compiling())
    assert heard(wait, submit(1), submit(2), event) == [submit(1), event]
    assert wait.waiting


def test_what_concerns_many_comes_after_all_that_waits() -> None:
    for event in (DropProxy(ProxyId(0)), ForgetPeer(InstanceId("decode-0"), (7,))):
        assert heard(GrammarWait(Compiling()), submit(1), submit(2), event) == [submit(1), submit(2), event]


def test_many_are_released_without_a_look_at_each_other() -> None:
    """It took a fifth of a second for 4 000, in which no step ran."""

    class Number(int):
        def __eq__(self, other: object) -> bool:
            raise AssertionError

        __hash__ = int.__hash__

    engine = Compiling()
    wait = GrammarWait(engine)
    assert heard(wait, *[submit(Number(at)) for at in range(3)]) == []
    engine.done = True
    assert len(wait.ready()) == 3 and not wait.waiting
