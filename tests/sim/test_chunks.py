"""The purpose of chunks: requests that decode are on time, however long the prompts are that arrive beside them."""

from __future__ import annotations

from dataclasses import replace

from msgspec.structs import replace as with_fields

from aegis.core.clock import NS_PER_MS, NS_PER_S
from aegis.core.ids import RequestId
from aegis.core.model import Slo
from aegis.sim.market import SimRequest
from aegis.sim.simulation import Outcome, simulate
from aegis.sim.step_costs import StepCosts
from aegis.telemetry.spans import Span, SpanKind
from tests.parity.scenarios import Scenario

SLO = Slo(ttft_ns=100 * NS_PER_MS, tbt_ns=20 * NS_PER_MS, gap_ns=40 * NS_PER_MS)
COSTS = StepCosts.of_ms(decode=(6.0, 0.0, 0.1), prefill=(1.0, 100.0, 2.0))
LESSONS = (20, 800, 200, 3000, 100, 1500) * 4  # from which the instance learns what prefills take
PROMPTS = (2500, 1500, 3000)
ANSWER = RequestId(len(LESSONS) + 1)
TOKENS = 200


def play(chunk_tokens: int | None) -> Outcome:
    """An answer, and long prompts while it is written."""
    pool = Scenario(
        policy="least-slack", chunk_tokens=chunk_tokens, whole=chunk_tokens is None, models=1, pages=160
    ).pool()
    (spec,) = (with_fields(spec, slo=SLO) for spec in pool.specs)
    pool = replace(
        pool,
        specs=(spec,),
        gpu=replace(pool.gpu, flops_per_s=2 * 10**10, fits={spec.model: COSTS}),
        keep_spans=True,
        prefills=0,
        decodes=0,
        mixed=1,
    )
    lessons = [SimRequest(at * NS_PER_S, spec.model, prompt, 1) for at, prompt in enumerate(LESSONS)]
    start_ns = len(lessons) * NS_PER_S
    long = [
        SimRequest(start_ns + (50 + 300 * at) * NS_PER_MS, spec.model, prompt, 3) for at, prompt in enumerate(PROMPTS)
    ]
    return simulate(pool, [*lessons, SimRequest(start_ns, spec.model, 20, TOKENS), *long])


def latest_ns(outcome: Outcome) -> int:
    """By how much its latest token was late."""
    (record,) = (record for record in outcome.records if record.request == ANSWER)
    times = record.token_times_ns
    assert len(times) == TOKENS
    return max(time_ns - SLO.due_ns(record.arrival_ns, at) for at, time_ns in enumerate(times))


def prefills(outcome: Outcome) -> list[Span]:
    return [span for span in outcome.spans if span.kind is SpanKind.PREFILL]


def test_no_token_is_late_by_a_prefill_that_is_cut() -> None:
    """But for what the instance misjudges."""
    assert latest_ns(play(None)) > 100 * NS_PER_MS, "there are prompts that take too long"
    assert latest_ns(play(80)) < SLO.tbt_ns


def test_chunks_do_all_of_the_work() -> None:
    whole, chunks = prefills(play(None)), prefills(play(80))
    assert len(whole) == sum(span.steps for span in chunks) < len(chunks)
    assert sum(span.tokens for span in whole) == sum(span.tokens for span in chunks)
    for span in chunks:
        took_ns = COSTS.step_ns(span.prompts, span.stream_tokens, span.streams)
        assert span.stop_ns - span.start_ns == took_ns
