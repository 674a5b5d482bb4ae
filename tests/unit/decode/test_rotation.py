"""Rows that the device does not hold together take turns at its memory: who is ahead leaves for who is about to be
late."""

from __future__ import annotations

import dataclasses

import pytest
from msgspec.structs import replace

from aegis.core.clock import NS_PER_MS
from aegis.core.decision import Decision, DecisionKind
from aegis.core.estimators import Hardware
from aegis.core.ids import InstanceId, RequestId
from aegis.core.messages import Cancel, NeedSlabs
from aegis.core.model import Slo
from aegis.sim.faults.fake_models import PAGE, make_spec
from decode.core import DecodeCore
from decode.policies.least_slack import LeastSlack
from tests.sim.driven import Driven, ledger
from tests.unit.decode.turns import running, settle, step, take

SLO = Slo(ttft_ns=50 * NS_PER_MS, tbt_ns=1_500_000, gap_ns=20 * NS_PER_MS)
ROWS = make_spec(8, image_pages=3, block_bytes=PAGE, slo=SLO)  # a block of 16 tokens fills a slab


def outgrown(*, rotates: bool = True, slo: Slo = SLO, explains: bool = False) -> Driven[DecodeCore]:
    """Requests 1 and 2 ran until 12 slabs held no more of both; request 2 waits."""
    policy = LeastSlack(rules=dataclasses.replace(LeastSlack().rules, rotates=rotates))
    core = DecodeCore(InstanceId("decode-0"), ledger(3 + 12), policy, Hardware(), explains=explains)
    driven = Driven(core, (replace(ROWS, slo=slo),), slabs=64)
    for request in (1, 2):
        take(driven, request, ROWS, prompt=20, max_tokens=400)
    settle(driven)
    while 2 in running(driven):
        step(driven)
        settle(driven)
    assert running(driven) == [1]
    return driven


def generated(driven: Driven[DecodeCore], request: int) -> int:
    return driven.core._by_request[RequestId(request)].generated


def steps_until(driven: Driven[DecodeCore], wanted: list[int], most: int = 80) -> int | None:
    for count in range(most):
        if running(driven) == wanted:
            return count
        step(driven)
        settle(driven)
    return None


def test_who_is_ahead_leaves_for_who_is_about_to_be_late() -> None:
    driven = outgrown()
    steps = steps_until(driven, [2])
    assert steps is not None
    slack_ns = SLO.due_ns(0, generated(driven, 2)) - driven.now_ns
    assert 0 <= slack_ns <= 2 * SLO.gap_ns, "its next token is on time"
    assert SLO.due_ns(0, generated(driven, 1)) - driven.now_ns > slack_ns + SLO.gap_ns
    assert driven.core.running == 1 and driven.core.counters.preemptions == 1
    driven.on(Cancel(RequestId(2), 1))
    driven.stepped(2)
    settle(driven)
    assert running(driven) == [1] and driven.core.counters.given_up == 0


def test_without_the_rule_they_wait_for_the_end_of_others() -> None:
    assert steps_until(outgrown(rotates=False), [2]) is None


@pytest.mark.parametrize(("slack_ns", "comes"), [(5 * NS_PER_MS, True), (-5 * NS_PER_MS, False)])
def test_who_is_late_waits(slack_ns: int, comes: bool) -> None:
    """Where there is too little for all, some are on time, and not all are late."""
    driven = outgrown()
    for _ in range(80):
        driven.stepped(2, after_ns=1)  # request 1 is far ahead
    driven.now_ns = SLO.due_ns(0, generated(driven, 2)) - slack_ns
    driven.stepped(2, after_ns=1)
    settle(driven)
    assert (running(driven) == [2]) == comes


def test_nobody_leaves_that_is_hardly_ahead() -> None:
    assert steps_until(outgrown(slo=replace(SLO, tbt_ns=1_100_000)), [2]) is None


def test_where_the_host_has_no_slab_nobody_is_given_up_for_it() -> None:
    """It waits for the host's answer, and goes on when that is a refusal."""
    driven = outgrown()
    driven._leases = None
    while not driven.said(NeedSlabs):
        step(driven)
    assert not running(driven)
    driven.granted(refused=True)
    assert running(driven) == [1] and driven.core.counters.given_up == 0
    assert steps_until(driven, [2], most=20) is None


def test_it_is_told_who_leaves_and_why() -> None:
    driven = outgrown(explains=True)
    while not (told := [each for each in driven.asked(Decision) if each.kind is DecisionKind.EVICT]):
        step(driven)
    (why,) = [each.why.because for each in told]
    assert "furthest ahead of its deadlines" in why and "request 2 of m8" in why
