"""The simulator and the live server decide the same: line for line, at the same nanosecond."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from aegis.core.clock import NS_PER_MS, NS_PER_S
from aegis.core.role import Roles
from aegis.policies import RECIPES, Site
from aegis.sim.simulation import simulate
from aegis.telemetry.decisions import DecisionLog
from proxy.policies.kvpr import KvPressureRatio
from proxy.policies.pressure import Pressure
from proxy.routing.placement_views import PlacementPolicy, PlacementRules
from tests.long_forms import LONG, first_of
from tests.parity.live import LiveRun
from tests.parity.scenarios import Scenario

SEEDS = 5  # of each scenario, and no two scenarios have one in common
PLAYED = SEEDS if LONG else 2
SCENARIOS = {
    "swaps": Scenario(pages=26, requests=40, over_s=5, leaving=40),
    "no memory left": Scenario(
        pages=30, host_slabs=9, decodes=2, models=6, requests=40, over_s=3, leaving=30, message_us=3_000
    ),
    "many instances": Scenario(
        pages=50, host_slabs=20, prefills=2, decodes=3, models=7, requests=50, over_s=5, leaving=10
    ),
    "shared device": Scenario(pages=36, host_slabs=16, decodes=2, devices=1, requests=20, over_s=4, leaving=20),
    "late answers": Scenario(
        pages=30, host_slabs=24, decodes=2, devices=1, requests=15, over_s=6, leaving=20, token_us=12_000
    ),
    "idle instances": Scenario(
        pages=30, prefills=2, decodes=3, devices=2, requests=25, over_s=20, leaving=20, idle_ns=700 * NS_PER_MS
    ),
    "chunks": Scenario(
        policy="least-slack", chunk_tokens=64, prompt_max=900, token_us=400, pages=60, requests=40, leaving=20
    ),
}
DECIDED = {
    "swaps": ("preempts", "copy on swap_out", "move", "pages refused", "on prefetch", "abandon load", "end run"),
    "no memory left": ("preempts", ": cancel", "slabs refused", "gives up"),
    "many instances": ("preempts", ": cancel", "slabs refused", "pages refused", "copy on swap_out"),
    "shared device": ("preempts", ": cancel", "pages refused", "urgently", ": take back", "gives back"),
    "late answers": ("preempts", ": cancel", "pages refused", "nothing of"),
    "idle instances": ("preempts", ": cancel", "gently, keep 0", "wipe"),
    "chunks": ("preempts", ": cancel", ", 0-", "copy on swap_out"),
}
"""The subject of each scenario: its logs have such lines."""

RIVALS = sorted(name for name in RECIPES if name != "aegaeon" and "oracle" not in name)


def both(scenario: Scenario, seed: int) -> tuple[list[str], list[str]]:
    """The lines of the simulator and of the live run, where clients saw the same. Time goes on in the live run: what
    idle instances are asked for after the last answer is left out."""
    log, arrivals, orders = DecisionLog(), scenario.arrivals(seed), scenario.orders(seed)
    outcome = simulate(scenario.pool(), arrivals, decisions=log, orders=orders)
    run = LiveRun(scenario.pool(), arrivals, orders)
    run.run(outcome.ended_ns + NS_PER_S)
    assert {record.request: record.ended for record in outcome.records} == {
        request: answer.ended for request, answer in run.answers.items()
    }
    for record in outcome.records:
        if record.ended == "finished":
            assert tuple(run.answers[record.request].token_times_ns) == record.token_times_ns
    if not scenario.watched:
        return log.lines, run.log.lines
    ended_ns = max(answer.ended_ns for answer in run.answers.values())
    return _until(ended_ns, log.lines), _until(ended_ns, run.log.lines)


def difference(simulated: list[str], live: list[str]) -> str:
    """The first one, with what led to it; empty if there is none."""
    for at in range(max(len(simulated), len(live))):
        if simulated[at : at + 1] != live[at : at + 1]:
            parts = simulated[max(at - 5, 0) : at], ["simulated:"], simulated[at : at + 3], ["live:"], live[at : at + 3]
            return "\n".join(line for part in parts for line in part)
    return ""


def _until(time_ns: int, lines: list[str]) -> list[str]:
    return [line for line in lines if int(line.partition(" ")[0]) <= time_ns]


@pytest.mark.parametrize("name", first_of(3, list(SCENARIOS)))
def test_the_same_is_decided(name: str) -> None:
    first = (1 + list(SCENARIOS).index(name)) * SEEDS
    missing = set(DECIDED[name])
    for seed in range(first, first + PLAYED):
        simulated, live = both(SCENARIOS[name], seed)
        assert not difference(simulated, live), f"seed {seed}"
        missing -= {what for what in missing if any(what in line for line in simulated)}
    assert not missing, "nothing of this kind was decided"


@pytest.mark.parametrize("roles", first_of(1, list(Roles)))
@pytest.mark.parametrize("at", first_of(1, range(2)), ids=["swaps", "many instances"])
def test_slack_decides_the_same(at: int, roles: Roles) -> None:
    """On prefill instances too, where jobs pass each other."""
    known = (SCENARIOS["swaps"], SCENARIOS["many instances"])[at]
    scenario = replace(known, policy="least-slack", roles=roles, over_s=3)
    first = 1000 + (2 * at + (roles is Roles.AUTO)) * SEEDS
    for seed in range(first, first + PLAYED):
        simulated, live = both(scenario, seed)
        assert simulated and not difference(simulated, live), f"seed {seed}"


@pytest.mark.parametrize("roles", first_of(1, list(Roles)))
def test_what_is_kept_is_the_same(roles: Roles) -> None:
    """And is given up for what lives, host memory being short."""
    scenario = Scenario(policy="least-slack", roles=roles, host_slabs=10, requests=25, leaving=20, reuses=True)
    missing = {"offers KV", "tokens kept in", "reuses", "is intact", "has kept"}
    for seed in range(2000, 2000 + PLAYED):
        simulated, live = both(scenario, seed)
        assert simulated and not difference(simulated, live), f"seed {seed}"
        missing -= {what for what in missing if any(what in line for line in simulated)}
    assert not missing, "nothing of this kind was decided"


@pytest.mark.parametrize("policy", first_of(5, list(RIVALS)))
def test_rivals_decide_the_same(policy: str) -> None:
    """On instances that prefill and decode."""
    seed = len(SCENARIOS) * SEEDS + RIVALS.index(policy)
    simulated, live = both(Scenario(requests=25, leaving=20, policy=policy), seed)
    assert simulated and not difference(simulated, live)


@pytest.mark.parametrize("roles", first_of(1, list(Roles)))
@pytest.mark.parametrize("policy", first_of(1, ["least-slack", "aegaeon"]))
def test_moves_go_the_same_way(policy: str, roles: Roles) -> None:
    """With and without KV, which is passed on where it had not arrived."""
    scenario = Scenario(policy=policy, roles=roles, decodes=2, pages=60, requests=30, over_s=4, leaving=20, moves=12)
    missing = {"bring m", " there", "hand ", "hands ", "over after", "adopt"}
    for seed in range(3000, 3000 + PLAYED):
        simulated, live = both(scenario, seed)
        assert simulated and not difference(simulated, live), f"seed {seed}"
        missing -= {what for what in missing if any(what in line for line in simulated)}
    assert not missing, "nothing of this kind was decided"


@pytest.mark.parametrize(
    "placement",
    first_of(
        1,
        [
            lambda site: Pressure(short_ppm=60_000, rules=PlacementRules(settled_ns=NS_PER_S, keeps=False)),
            lambda site: KvPressureRatio(),
        ],
    ),
    ids=["pressure", "kvpr"],
)
def test_models_are_placed_alike(placement: Callable[[Site], PlacementPolicy]) -> None:
    """Where models move by load, and home."""
    scenario = Scenario(
        policy="least-slack", decodes=2, pages=60, requests=60, over_s=20, leaving=20, placement=placement
    )
    missing = {"bring m", "hands ", "its model was placed there"}
    for seed in range(4000, 4000 + PLAYED):
        simulated, live = both(scenario, seed)
        assert simulated and not difference(simulated, live), f"seed {seed}"
        missing -= {what for what in missing if any(what in line for line in simulated)}
    assert not missing, "nothing of this kind was decided"
