"""The scheduling of requests, as every process of a market has to know it."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from aegis.core.estimators import Hardware
from aegis.core.views import PrefillOrder
from aegis.policies import Policy, Site, recipe, with_step_tokens
from decode.policies.weighted_round_robin import WeightedRoundRobin
from prefill.policies.grouped_fcfs import GroupedFcfs
from proxy.routing.placement_views import PlacementPolicy
from proxy.routing.router import Router


class SchedulingSettings(Struct, frozen=True, kw_only=True):
    """The policy and its constants."""

    policy: str
    memory_bytes: int  # the memory that a policy assumes its device to have
    max_group_size: int
    q_max_ns: int
    switching_share: float
    hardware: Hardware  # the assumed device, until steps and copies are measured
    explains: bool = False
    reuses: bool = False  # KV of requests that have ended
    step_tokens: int | None = None  # of prompts, in one step at most

    def shared(self) -> dict[str, Any]:
        """All of them by name, for the settings of another process."""
        return {name: getattr(self, name) for name in SchedulingSettings.__struct_fields__}

    def scheduler(self) -> Policy:
        """The policy of places, for a proxy, and of turns, for an instance. Raises UserError."""
        turns = WeightedRoundRobin(self.q_max_ns, self.switching_share)
        policy = recipe(self.policy).policy(Site(memory_bytes=self.memory_bytes, turns=turns))
        return policy if self.step_tokens is None else with_step_tokens(policy, self.step_tokens, self.policy)

    def prefill_order(self) -> PrefillOrder | None:
        """The order of jobs on a prefill instance; None: one group after the other. Raises UserError."""
        return recipe(self.policy).order

    def placement(self) -> PlacementPolicy | None:
        """The policy that moves models between instances, if the scheduler has one. Raises UserError."""
        made = recipe(self.policy).placement
        return made(Site(memory_bytes=self.memory_bytes)) if made else None

    def router(self) -> Router:
        """The router of a proxy. Raises UserError."""
        groups, policy = GroupedFcfs(self.max_group_size), self.scheduler()
        prefill = recipe(self.policy).prefill(Site(memory_bytes=self.memory_bytes, groups=groups))
        return Router(prefill, policy, self.hardware, max_batch=policy.rules.max_batch, explains=self.explains)
