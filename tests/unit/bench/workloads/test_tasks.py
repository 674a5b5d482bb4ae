"""The tasks of MuxWise's evaluation are as long as its Table 1 says."""

from __future__ import annotations

import pytest

from aegis.core.rng import Stream
from bench.workloads import spec
from bench.workloads.tasks import TASKS


@pytest.mark.parametrize("name", TASKS)
def test_lengths_have_the_means_and_the_bounds_of_the_table(name: str) -> None:
    task, draws = TASKS[name], Stream(0, "tasks")
    drawn = [task.draw(draws) for _ in range(20_000)]
    for column, (least, mean, most) in enumerate((task.inputs, task.outputs)):
        tokens = [lengths[column] for lengths in drawn]
        assert min(tokens) >= least and max(tokens) <= most
        assert sum(tokens) / len(tokens) == pytest.approx(mean, rel=0.12)
    reused = sum(lengths[2] for lengths in drawn) / sum(lengths[0] for lengths in drawn)
    expected = task.reused or min(task.shared / task.inputs[1], 1)
    assert reused == pytest.approx(expected, abs=0.02)
    assert all(0 <= lengths[2] <= lengths[0] for lengths in drawn)


def test_a_workload_says_what_is_reused() -> None:
    arrivals = spec.parse("poisson:models=1,rps=5,duration=20,lengths=tool-agent", 1)
    assert arrivals and any(arrival.reused_tokens for arrival in arrivals)
    assert not any(arrival.reused_tokens for arrival in spec.parse("poisson:models=1,rps=5,duration=20", 1))
