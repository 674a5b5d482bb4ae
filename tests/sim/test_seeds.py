"""Seeds of harsh scenarios; `make test-seeds` plays many more of them."""

from __future__ import annotations

import pytest

from aegis.policies import RECIPES
from tests.long_forms import first_of
from tests.sim.harsh import scenario_of
from tests.sim.seeds import failures

CHUNK = 25


@pytest.mark.parametrize("first", first_of(1, range(0, 300, CHUNK)))
def test_no_seed_breaks_a_law(first: int) -> None:
    broken = failures(range(first, first + CHUNK))
    assert not broken, "\n".join(broken)


def test_seeds_come_to_every_policy_and_pool() -> None:
    setups = [str(scenario_of(seed)[0]) for seed in range(300)]
    assert {setup.partition(",")[0] for setup in setups} == {*RECIPES, "least-slack (chunks)"}
    ours = {setup.partition(", ")[2] for setup in setups if setup.startswith("least-slack,")}
    assert {"0 + 0 instances and 1 mixed", "1 + 1 instances and 0 mixed", "1 + 1 instances and 1 mixed"} <= ours
