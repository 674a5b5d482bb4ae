"""Mixed instances under seeded chance, with every policy of turns: the laws are those of split pools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from msgspec.structs import replace

from aegis.core.ids import InstanceId
from aegis.core.views import BatchView, DecodeView, Renewal, Turn, TurnRules, Work
from aegis.policies import Policy
from aegis.sim.faults.fake_models import PAGE
from aegis.sim.faults.world import Scenario
from decode.policies.chunked_prefill import ChunkedPrefill
from decode.policies.decode_first import DecodeFirst
from decode.policies.least_slack import LeastSlack
from decode.policies.muxserve import MuxServe
from decode.policies.muxwise import MuxWise
from decode.policies.prefill_first import PrefillFirst
from decode.policies.prism import Prism
from decode.policies.qlm import Qlm
from decode.policies.serverlessllm import ServerlessLlm, ServerlessLlmAsPublished
from decode.policies.serverlessllm_oracle_sjf import ServerlessLlmOracleSjf, ServerlessLlmOracleSjfAsPublished
from decode.policies.static_places import DIVIDED_KV, StaticPlaces
from decode.policies.weighted_round_robin import WeightedRoundRobin
from tests.long_forms import LONG, first_of
from tests.sim.test_cores import LARGE_BLOCKS, SPECS, play

Q_MAX_NS = 30_000_000
LANES = ((250, 750), (500, 500), (750, 250))


@dataclass(frozen=True, slots=True)
class Cut:
    """A policy, with every prefill cut into the shortest chunks."""

    policy: Policy
    rules: TurnRules

    def place(self, work: Work, lists: DecodeView) -> InstanceId | None:
        return self.policy.place(work, lists)

    def plan(self, batches: Sequence[BatchView], now_ns: int) -> list[Turn]:
        return [replace(turn, free_until_ns=0) for turn in self.policy.plan(batches, now_ns)]


POLICIES: dict[str, Policy] = {
    "aegaeon": WeightedRoundRobin(Q_MAX_NS),
    "prefill-first": PrefillFirst(WeightedRoundRobin(Q_MAX_NS)),
    "decode-first": DecodeFirst(WeightedRoundRobin(Q_MAX_NS)),
    "serverlessllm": ServerlessLlm(),
    "serverlessllm as published": ServerlessLlmAsPublished(),
    "sjf": ServerlessLlmOracleSjf(lambda request: request * 7 % 31),
    "sjf as published": ServerlessLlmOracleSjfAsPublished(lambda request: request * 7 % 31, resort_ns=Q_MAX_NS),
    "qlm": Qlm(),
    "muxserve": MuxServe(16 * PAGE, slice_ns=5_000_000),
    "prism": Prism(slice_ns=5_000_000),
    "s-partition": StaticPlaces(16 * PAGE, slice_ns=5_000_000, rules=DIVIDED_KV),
    "muxserve++": StaticPlaces(16 * PAGE, slice_ns=5_000_000),
    "muxwise": MuxWise(WeightedRoundRobin(Q_MAX_NS)),
    "muxwise, pieces of a step": MuxWise(WeightedRoundRobin(Q_MAX_NS), piece_steps=1),
    "chunked prefill": ChunkedPrefill(WeightedRoundRobin(Q_MAX_NS), TurnRules(chunk_tokens=16, budget_tokens=32)),
    "least slack": LeastSlack(),
    "chunks": Cut(LeastSlack(), TurnRules(renewal=Renewal.ARRIVAL, chunk_tokens=16)),
    "chunks and turns": Cut(WeightedRoundRobin(Q_MAX_NS), TurnRules(chunk_tokens=32)),
    "chunks without their KV": Cut(Qlm(), TurnRules(chunk_tokens=16, keeps_kv=False)),
}
each_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=list(POLICIES))
FEW = ("aegaeon", "least slack", "muxwise", "chunked prefill")
"""One for each way to share a device. Each other one is played where instances die."""
FEW_FIRST = sorted(POLICIES, key=lambda name: name not in FEW)
few_policies = pytest.mark.parametrize(
    "policy", first_of(len(FEW), [POLICIES[name] for name in FEW_FIRST]), ids=FEW_FIRST
)


def mixed(policy: Policy, **sizes: object) -> Scenario:
    """Devices can be divided, which no other policy than those of lanes does."""
    given = {"specs": SPECS, "pages": 64, "host_slabs": 48, "requests": 60, "mixed": 2, "lane_shares": LANES} | sizes
    return Scenario(prefills=0, decodes=0, policy=policy, **given)  # type: ignore[arg-type]


@few_policies
@pytest.mark.parametrize("seed", first_of(1, range(3)))
def test_undisturbed(policy: Policy, seed: int) -> None:
    ended = play(mixed(policy), seed).ended.values()
    failed = [end.message for end in ended if end.state == "failed"]
    assert all("no instance has a place" in message for message in failed)
    assert not failed or isinstance(policy, MuxServe | StaticPlaces)


@each_policy
@pytest.mark.parametrize("seed", first_of(1, range(3)))
def test_instances_die(policy: Policy, seed: int) -> None:
    play(mixed(policy, deaths=4, jitter_ns=2_000_000), seed)


@few_policies
def test_little_memory_anywhere(policy: Policy) -> None:
    scenario = mixed(
        policy, specs=LARGE_BLOCKS, pages=32, host_slabs=9, mixed=1, gap_ns=200_000, prompt_max=80, output_max=20
    )
    for seed in range(2 if LONG else 1):
        play(scenario, seed)


@few_policies
def test_models_leave_and_the_engine_fails(policy: Policy) -> None:
    play(mixed(policy, removals=6, deaths=2, failing_share=0.01, jitter_ns=2_000_000), 1)


def test_a_mixed_instance_keeps_what_it_prefilled() -> None:
    (counters,) = play(mixed(WeightedRoundRobin(Q_MAX_NS), mixed=1, cancel_share=0.0), 3).decode_counters()
    assert counters.prefills == 60 and counters.swap_in_bytes == counters.swap_out_bytes == 0


@pytest.mark.parametrize("seed", first_of(2, range(4)))
def test_mixed_instances_take_what_others_hand_over(seed: int) -> None:
    """Beside prefill and decode instances: requests arrive at the former, and go on at either of the others."""
    scenario = Scenario(specs=SPECS, pages=64, host_slabs=48, mixed=1, requests=60, deaths=3)
    play(scenario, seed)
