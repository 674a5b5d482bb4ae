"""LoRA adapters in a simulation: one batch and one residency with their base."""

from __future__ import annotations

from msgspec.structs import replace

from aegis.core.ids import ModelId
from aegis.core.model import Slo
from aegis.policies import recipe
from aegis.sim.gpu_costs import gpu
from aegis.sim.market import SimRequest
from aegis.sim.shapes import SHAPES
from aegis.sim.simulation import Outcome, Pool, simulate
from aegis.telemetry.decisions import DecisionLog
from aegis.telemetry.spans import SpanKind

S = 10**9
BASE, OTHER = ModelId("base"), ModelId("other")
ADAPTERS = {ModelId(f"adapter-{index}"): BASE for index in range(4)}
SHAPE = SHAPES["llama-3-8b"]
BESIDE = 4 * SHAPE.adapter_bytes(16)
SPECS = (SHAPE.spec(BASE, Slo(), beside_bytes=BESIDE), SHAPE.spec(OTHER, Slo()))
NAMES = (*ADAPTERS, BASE, OTHER)


def play(wanted: list[SimRequest], log: DecisionLog | None = None) -> Outcome:
    pool = Pool(gpu=gpu("h800"), specs=SPECS, recipe=recipe("least-slack"), mixed=1, adapters=ADAPTERS)
    return simulate(pool, wanted, decisions=log)


def wanted(base_for_all: bool) -> list[SimRequest]:
    names = [NAMES[index % len(NAMES)] for index in range(60)]
    return [
        SimRequest(index * S // 5, BASE if base_for_all and name in ADAPTERS else name, 100 + index, 50)
        for index, name in enumerate(names)
    ]


def test_adapters_are_scheduled_as_their_base_is() -> None:
    logs = DecisionLog(), DecisionLog()
    of_adapters, of_base = (play(wanted(of), log) for of, log in zip((False, True), logs, strict=True))
    assert logs[0].lines == logs[1].lines
    assert {record.model for record in of_adapters.records} == set(NAMES)
    assert [replace(record, model=ADAPTERS.get(record.model, record.model)) for record in of_adapters.records] == (
        of_base.records
    )


def test_a_switch_between_adapters_moves_nothing_and_one_to_the_base_brings_them_along() -> None:
    wanted = [SimRequest(index * 10 * S, NAMES[index], 100, 20) for index in range(5)]
    pool = Pool(gpu=gpu("h800"), specs=SPECS, recipe=recipe("least-slack"), mixed=1, adapters=ADAPTERS, keep_spans=True)
    outcome = simulate(pool, wanted)
    assert {record.ended for record in outcome.records} == {"finished"}
    assert len(outcome.switches) == 1
    assert [span.nbytes for span in outcome.spans if span.kind is SpanKind.LOAD] == [SHAPE.weight_bytes + BESIDE]
