"""A model whose KV outgrows its GPU: no request waits for memory while another GPU has room."""

from __future__ import annotations

from dataclasses import replace

from aegis.core.ids import ModelId
from aegis.core.model import Slo
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
