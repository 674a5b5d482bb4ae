"""Messages of an instance reach their receivers."""

from __future__ import annotations

from aegis.core.ids import ModelId, ProxyId, nth_request
from aegis.core.messages import BroughtIn, HandedOver, NeedSlabs, Phase, StepsTook, SwitchDone, Tokens
from aegis.core.request import Token
from aegis.transport.links import addressed

FIRST, SECOND = PROXIES = (ProxyId(0), ProxyId(7))
MINE, ALSO_MINE, YOURS = nth_request(FIRST, 1), nth_request(FIRST, 2), nth_request(SECOND, 1)


def test_tokens_go_to_the_proxy_of_their_request_in_order() -> None:
    said = [Tokens(request, 1, 0, (Token(5),)) for request in (MINE, YOURS, ALSO_MINE)]
    assert addressed(said, PROXIES) == {FIRST: [said[0], said[2]], SECOND: [said[1]]}


def test_a_phase_is_told_in_parts() -> None:
    assert addressed([Phase((MINE, YOURS, ALSO_MINE), running=True)], PROXIES) == {
        FIRST: [Phase((MINE, ALSO_MINE), running=True)],
        SECOND: [Phase((YOURS,), running=True)],
    }


def test_everybody_hears_of_a_switch_and_the_node_alone_of_memory() -> None:
    switch, need = SwitchDone(ModelId("m"), False, 0, 0, 0, 0), NeedSlabs(2)
    assert addressed([switch, need], PROXIES) == {None: [switch, need], FIRST: [switch], SECOND: [switch]}


def test_proxies_alone_hear_how_long_steps_take_and_what_is_brought_in() -> None:
    said = [StepsTook(ModelId("m"), 500, 3, 12_000_000), BroughtIn(ModelId("m"), there=True)]
    assert addressed(said, PROXIES) == {FIRST: said, SECOND: said}


def test_who_is_handed_over_is_the_affair_of_its_proxy() -> None:
    said = [HandedOver(request, 1, 5, None) for request in (MINE, YOURS)]
    assert addressed(said, PROXIES) == {FIRST: [said[0]], SECOND: [said[1]]}
