"""What `least-slack` runs beside a decode where nothing keeps the gap."""

from __future__ import annotations

import pytest

from aegis.core.clock import NS_PER_MS
from aegis.core.ids import ModelId
from aegis.core.lane_views import Companion, Division, LanesView
from aegis.core.views import BatchView
from decode.policies.least_slack import LeastSlack


def batch(model: str = "a") -> BatchView:
    return BatchView(
        1, ModelId(model), 20 * NS_PER_MS, 50 * NS_PER_MS, 0, gap_ns=50 * NS_PER_MS, waiting=1, first_due_ns=10**9
    )


@pytest.mark.parametrize(
    ("model", "steps_ms", "alone_ms", "shares"),
    [
        ("a", (90, 40), 100, (750, 250)),
        ("a", (90, 58), 100, (750, 250)),
        ("a", (90, 61), 100, None),
        ("a", (90, 58), 20, None),
        ("b", (90, 58), 100, None),
    ],
    ids=["keeps", "better than turns", "worse than turns", "is not cut", "another model"],
)
def test_a_prompt_has_the_least_share_where_turns_would_stop_streams_for_longer(
    model: str, steps_ms: tuple[int, int], alone_ms: int, shares: tuple[int, int] | None
) -> None:
    divided = zip(((250, 750), (750, 250)), steps_ms, strict=True)
    divisions = [Division(shares, step * NS_PER_MS, 200 * NS_PER_MS, 1.5) for shares, step in divided]
    companion = Companion(batch(model), True, alone_ms * NS_PER_MS, divisions)
    choice = LeastSlack().beside(LanesView(batch(), 20 * NS_PER_MS, [companion]), 0)
    assert (choice.shares if choice else None) == shares
