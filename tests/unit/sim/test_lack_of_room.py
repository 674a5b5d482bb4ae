"""A model whose KV outgrows its GPU: no request waits for memory while another GPU has room. Where there is none, and
none on the host, little time goes into prefills of what was lost."""

from __future__ import annotations

from dataclasses import replace

from aegis.core.ids import ModelId
from aegis.core.model import ModelSpec, Slo
from aegis.policies import recipe
from aegis.sim.gpu_costs import gpu
from aegis.sim.market import SimRequest
from aegis.sim.shapes import SHAPES
from aegis.sim.simulation import Outcome, Pool, simulate

LARGE = SHAPES["llama-2-13b"].spec(ModelId("large"), Slo())
REQUESTS = [SimRequest(at_ns, LARGE.model, 3000, 2000) for at_ns in range(24)]


def play(*, moves: bool) -> Outcome:
    """What all make together is twice what one GPU holds beside the weights."""
    known = recipe("least-slack")
    known = known if moves else replace(known, placement=None)
    return simulate(Pool(gpu=gpu("h800"), specs=(LARGE,), recipe=known, mixed=2), REQUESTS)


def test_those_that_lack_room_go_on_elsewhere() -> None:
    outcome = play(moves=True)
    assert {record.ended for record in outcome.records} == {"finished"} and outcome.moves
    assert sum(move.moved + move.replayed for move in outcome.moves) < len(REQUESTS) / 2, "the others stay"
    assert all(record.on_time == record.output_tokens for record in outcome.records)


def test_they_would_be_late_where_nothing_moves() -> None:
    late = [record for record in play(moves=False).records if record.on_time < record.output_tokens / 2]
    assert len(late) > 2


def starved(requests: int, *models: ModelSpec) -> Outcome:
    """One GPU that holds eight of them, or 17 of one model, and a host without memory."""
    pool = Pool(gpu=gpu("h800"), specs=models, recipe=recipe("least-slack"), mixed=1, host_kv_bytes=0, keep_spans=True)
    wanted = [SimRequest(at, models[at % len(models)].model, 3000, 1000) for at in range(requests)]
    outcome = simulate(pool, wanted)
    assert {record.ended for record in outcome.records} == {"finished"}
    return outcome


def test_batches_of_a_model_do_not_take_turns_in_losing_their_kv() -> None:
    (counters,) = starved(24, LARGE).counters.values()
    assert 24 < counters["prefills"] <= 48, "those that came last wait for others to end"


def test_turns_of_models_that_lose_their_kv_to_each_other_are_worth_their_prefills() -> None:
    spans = starved(48, LARGE, SHAPES["llama-2-13b"].spec(ModelId("other"), Slo())).spans
    prefill, decode = (sum(s.stop_ns - s.start_ns for s in spans if s.kind == kind) for kind in ("prefill", "decode"))
    assert prefill < 1.5 * decode
