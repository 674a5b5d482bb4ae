"""The reasons of prefills, as they are told."""

from __future__ import annotations

import pytest

from aegis.core.decision import Why
from aegis.core.ids import InstanceId, ModelId, RequestId
from aegis.core.request import Job, Sampling
from prefill.reasons import next_decision


@pytest.mark.parametrize(("priority", "told"), [(0, "a is"), (-2, "a, of priority -2, is")])
def test_a_request_that_is_prefilled_is_told_with_its_priority(priority: int, told: str) -> None:
    job = Job(RequestId(7), 1, ModelId("a"), (1, 2), Sampling(max_tokens=9), 0, priority=priority)
    decision = next_decision(InstanceId("prefill-0"), job, Why("first of 3 in line"), 0, 1_000_000)
    assert decision.line == f"request 7 of {told} prefilled, as planned 1 ms ago: first of 3 in line"
