"""Two runs on parts of one simulated device, and what they take of each other's time."""

from __future__ import annotations

import pytest

from aegis.core.effects import Row, Run
from aegis.core.ids import ModelId, RequestId
from aegis.core.model import Slo
from aegis.core.request import Job, Sampling
from aegis.policies import recipe
from aegis.sim.compute_shares import WHOLE, ComputeShares, SharedBandwidth
from aegis.sim.gpu_costs import gpu
from aegis.sim.lane_run import DividedCompute, LaneRun
from aegis.sim.market import SimRequest
from aegis.sim.shapes import MIX, SHAPES
from aegis.sim.simulation import Pool, simulate
from aegis.sim.step_costs import StepCosts
from bench.workloads.arrival import model_name
from bench.workloads.spec import parse

COSTS = StepCosts.of_ms(decode=(10.0, 0.0, 0.0), prefill=(0.0, 100.0, 0.0))
SHARES = ComputeShares(units=100, step_units=10, prefill_traffic=0.3)
MODEL = ModelId("m")
FOR_EVER_NS = 1 << 62


def job(prompt: int) -> Job:
    return Job(RequestId(1), 1, MODEL, (0,) * prompt, Sampling(max_tokens=100), 0)


DECODE = Run(MODEL, (Row(job(5), 5, 6, (), 1, 0),), 100, FOR_EVER_NS)
PREFILL = Run(MODEL, (Row(job(1000), 0, 1000, (), 0),), 1, FOR_EVER_NS, 1)


class Device:
    """`reading` is the part of a decode step that reads memory."""

    def __init__(self, reading: float) -> None:
        self.now_ns = 0
        self.divided = DividedCompute(SHARES, SharedBandwidth(), lambda model, context, rows: reading)

    def begin(self, run: Run, share: int) -> LaneRun:
        lane_run = LaneRun(run, [100] * len(run.rows), lambda slowed: slowed.slow(self.now_ns))
        lane_run.begin(self.now_ns, COSTS, share=share, divided=self.divided)
        return lane_run

    def end(self, lane_run: LaneRun) -> None:
        lane_run.over(self.divided, None)


def test_on_the_whole_device_a_run_takes_what_it_does_without_lanes() -> None:
    alone, undivided = Device(1.0).begin(DECODE, WHOLE), LaneRun(DECODE, [100], lambda slowed: None)
    undivided.begin(0, COSTS)
    assert [alone.times.of(step) for step in range(100)] == [undivided.times.of(step) for step in range(100)]
    assert Device(1.0).begin(PREFILL, WHOLE).times.of(0) == 100_000_000


def test_a_part_of_the_device_costs_a_decode_less_than_a_prefill() -> None:
    assert Device(0.0).begin(DECODE, 500).times.of(0) == pytest.approx(10e6 * 1.2, rel=0.01)
    assert Device(0.0).begin(PREFILL, 500).times.of(0) == pytest.approx(100e6 * 17 / 9, rel=0.01)


def test_a_prompt_of_few_tokens_is_bound_by_what_it_reads_as_a_decode_is() -> None:
    short = Run(MODEL, (Row(job(10), 0, 10, (), 0),), 1, FOR_EVER_NS, 1)
    assert Device(0.0).begin(short, 500).times.of(0) == pytest.approx(10e6 * 1.2, rel=0.01)


def test_a_decode_is_slower_while_a_prefill_runs_beside_it() -> None:
    device = Device(1.0)
    decode = device.begin(DECODE, 700)
    alone_ns = decode.times.of(9) - decode.times.of(8)
    device.now_ns = decode.times.of(3)
    before = [decode.times.of(step) for step in range(4)]
    prefill = device.begin(PREFILL, 300)
    beside_ns = decode.times.of(9) - decode.times.of(8)
    assert 1.01 < beside_ns / alone_ns <= 1.3 and [decode.times.of(step) for step in range(4)] == before
    device.now_ns = prefill.times.of(0)
    device.end(prefill)
    assert decode.times.of(60) - decode.times.of(59) == pytest.approx(alone_ns, abs=2)


def test_a_run_that_is_to_end_ends_after_the_same_step_whoever_slows_it() -> None:
    device = Device(1.0)
    decode = device.begin(DECODE, 700)
    decode.times.steps, decode.ends = 3, True
    device.begin(PREFILL, 300)
    assert decode.times.steps == 3


def test_further_layers_of_a_prompt_read_nothing_twice() -> None:
    """A piece that stands for layers takes its part of the time of the whole prompt, and the first one what it takes
    whatever its length is."""
    costs = StepCosts.of_ms(decode=(10.0, 0.0, 0.0), prefill=(40.0, 100.0, 0.0))
    pieces = [Run(MODEL, (Row(job(1000), start, start + 50, (), 0),), 1, FOR_EVER_NS) for start in (0, 50)]
    took_ns = []
    for by_layers in (False, True):
        for piece in pieces:
            lane_run = LaneRun(piece, [100], lambda slowed: None)
            lane_run.begin(0, costs, by_layers=by_layers)
            took_ns.append(lane_run.times.of(0))
    assert took_ns == [45_000_000, 45_000_000, 45_000_000, 5_000_000]


def test_a_run_that_slows_one_beside_it_while_it_begins_is_not_looked_at_yet() -> None:
    """An instance that reports looks at all its runs when one of them is slowed."""
    specs = tuple(SHAPES[MIX[index]].spec(model_name(index), Slo()) for index in range(8))
    wanted = [
        SimRequest(a.at_ns, a.model, a.input_tokens, a.output_tokens)
        for a in parse("poisson:models=8,rps=0.8,duration=40", 2)
    ]
    outcome = simulate(Pool(recipe=recipe("least-slack"), gpu=gpu("a100"), specs=specs, mixed=1, lanes=True), wanted)
    assert {record.ended for record in outcome.records} == {"finished"}
