"""The stages of a request follow each other without a gap, from its arrival to its end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aegis.core.ids import ModelId, RequestId
from aegis.core.model import Slo
from aegis.telemetry.request_stages import EndedRequest, RequestStages, StageName

M, R = ModelId("m"), RequestId(7)
SLO = Slo(ttft_ns=10, tbt_ns=10)
QUEUE, PREFILL, HAND_OVER, DECODE, PREEMPTED = StageName


def arrived() -> tuple[RequestStages, list[EndedRequest]]:
    ended: list[EndedRequest] = []
    stages = RequestStages(ended.append)
    stages.arrived(R, M, SLO, 0, prompt_tokens=5)
    return stages, ended


def told(lived: EndedRequest) -> list[tuple[StageName, int, int, int]]:
    return [(stage.name, stage.start_ns, stage.stop_ns, stage.tokens) for stage in lived.stages]


def test_a_request_that_is_handed_over_and_preempted() -> None:
    stages, ended = arrived()
    stages.started(R, 3)
    stages.tokens(R, 8, 1)
    stages.handed_over(R, 8)
    stages.phase([R], 12, running=True)
    stages.tokens(R, 14, 2)
    stages.phase([R], 15, running=False)
    stages.phase([R], 20, running=True)
    stages.tokens(R, 55, 1)
    stages.end(R, "finished", 56)
    (lived,) = ended
    assert told(lived) == [
        (QUEUE, 0, 3, 0),
        (PREFILL, 3, 8, 1),
        (HAND_OVER, 8, 12, 0),
        (DECODE, 12, 15, 2),
        (PREEMPTED, 15, 20, 0),
        (DECODE, 20, 56, 1),
    ]
    assert (lived.tokens, lived.on_time, lived.how, lived.prompt_tokens) == (4, 3, "finished", 5)


def test_a_request_that_is_replayed_waits_again() -> None:
    stages, ended = arrived()
    stages.started(R, 1)
    stages.tokens(R, 2, 1)
    stages.replayed(R, 5)
    stages.phase([R], 6, running=True)
    stages.started(R, 7)
    stages.end(R, "failed", 9)
    assert [name for name, *_ in told(ended[0])] == [QUEUE, PREFILL, DECODE, QUEUE, PREFILL]


EVENTS = ("started", "tokens", "handed_over", "replayed", "runs", "stops")


@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 9))))
def test_whatever_happens_no_time_and_no_token_is_left_out(events: list[tuple[str, int]]) -> None:
    stages, ended = arrived()
    now_ns = tokens = 0
    for event, later_ns in events:
        now_ns += later_ns
        match event:
            case "tokens":
                stages.tokens(R, now_ns, 2)
                tokens += 2
            case "runs" | "stops":
                stages.phase([R, RequestId(8)], now_ns, running=event == "runs")
            case _:
                getattr(stages, event)(R, now_ns)
    stages.end(R, "cancelled", now_ns)
    (lived,) = ended
    borders = [(stage.start_ns, stage.stop_ns) for stage in lived.stages]
    assert [0, *(stop for _, stop in borders)] == [*(start for start, _ in borders), now_ns]
    assert lived.tokens == tokens >= sum(stage.tokens for stage in lived.stages)
