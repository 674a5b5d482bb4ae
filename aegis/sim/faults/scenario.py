"""Sizes of a run with faults."""

from __future__ import annotations

from dataclasses import dataclass

from aegis.core.model import ModelSpec
from aegis.core.views import PrefillOrder, PrefillPolicy
from aegis.policies import Policy
from aegis.sim.faults.plan import NOTHING, Plan
from decode.core import DecodeCore
from decode.policies.weighted_round_robin import WeightedRoundRobin
from prefill.core import PrefillCore
from prefill.policies.grouped_fcfs import GroupedFcfs

_POLICY = WeightedRoundRobin(30_000_000)
_GROUPED = GroupedFcfs()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A market, its memory, its requests, and what goes wrong: by chance, or as the `plan` has it."""

    specs: tuple[ModelSpec, ...]
    pages: int  # of the device that all instances share
    host_slabs: int
    cache_extents: int = 0  # of the node's model cache
    prefills: int = 1
    decodes: int = 1
    mixed: int = 0
    policy: Policy = _POLICY  # of decode and mixed instances
    prefill: PrefillPolicy = _GROUPED
    order: PrefillOrder | None = None
    decode_core: type[DecodeCore] = DecodeCore
    prefill_core: type[PrefillCore] = PrefillCore
    requests: int = 40
    deaths: int = 0
    removals: int = 0
    cancel_share: float = 0.1
    give_up_ns: int | None = None  # a request without a token after this time fails
    refuses: bool = False  # whom there is no time for
    failing_share: float = 0.0  # of steps on which the engine raises
    gap_ns: int = 2_000_000
    jitter_ns: int = 0  # the largest delay of a message behind the fastest
    prompt_max: int = 120
    output_max: int = 80
    moves: int = 0  # of limits, drawn by chance
    priority_max: int = 0
    lane_shares: tuple[tuple[int, ...], ...] = ()  # the divisions that devices offer
    reuses: bool = False  # KV of requests that have ended
    alike: int = 0  # so many beginnings of prompts there are; 0: no two are alike
    idle_ns: int = 20_000_000
    patience_ns: int = 40_000_000
    plan: Plan = NOTHING
