"""The schedulers by name: ours and its rivals, each with what it needs of a pool.

`aegis launch --policy` and the simulator take them from here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any, Protocol, cast

from aegis.core.clock import NS_PER_S
from aegis.core.errors import UserError
from aegis.core.ids import ModelId
from aegis.core.role import Roles
from aegis.core.views import DecodePolicy, PrefillOrder, PrefillPolicy, RoundPolicy
from decode.policies.chunked_prefill import ChunkedPrefill
from decode.policies.decode_first import DecodeFirst
from decode.policies.dedicated import Dedicated
from decode.policies.least_slack import LeastSlack
from decode.policies.muxserve import MuxServe
from decode.policies.muxwise import MuxWise
from decode.policies.prefill_first import PrefillFirst
from decode.policies.prism import Prism
from decode.policies.qlm import Qlm
from decode.policies.serverlessllm import ServerlessLlm, ServerlessLlmAsPublished
from decode.policies.serverlessllm_oracle_sjf import (
    Left,
    ServerlessLlmOracleSjf,
    ServerlessLlmOracleSjfAsPublished,
)
from decode.policies.static_places import DIVIDED_KV, StaticPlaces
from decode.policies.weighted_round_robin import WeightedRoundRobin
from prefill.policies.grouped_fcfs import GroupedFcfs
from prefill.policies.least_slack import LeastSlackPrefill
from proxy.policies.kvpr import KvPressureRatio
from proxy.policies.pressure import Pressure
from proxy.routing.placement_views import PlacementPolicy

_PUBLISHED_BYTES_PER_S = 16_600_000_000
"""The artifact's link: it takes 14, 18 and 26 GB at 16 GB/s, which the real images take at this rate on average."""
_GROUPED = GroupedFcfs()
_TURNS = WeightedRoundRobin()
_PREFILLS = LeastSlackPrefill()


class Policy(DecodePolicy, RoundPolicy, Protocol):
    """A scheduler: where requests go on, and the turns there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """The parameters of a policy when it is made: `memory_bytes` of an instance's device, `turns` as they are
    configured, as are the `groups` of prefills, and the oracle. `rates`: the tokens per second that each model is
    expected to be asked for, where somebody knows; a model without one counts by its weights."""

    memory_bytes: int
    turns: WeightedRoundRobin = _TURNS
    groups: GroupedFcfs = _GROUPED
    left: Left | None = None
    rates: Mapping[ModelId, float] = field(default_factory=dict)

    def oracle(self) -> Left:
        """Raises UserError if nobody knows how long answers will be."""
        if self.left is None:
            raise UserError("a policy with an oracle knows how long answers will be; only `aegis simulate` can run it")
        return self.left


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A scheduler, as it is run.

    `roles` are those it is made for; None: either. Where there are prefill instances, `prefill` says who goes to which,
    and `order` who is next there; None: one group after the other. None of the overrides: what the machine has.
    """

    name: str
    about: str
    policy: Callable[[Site], Policy]
    roles: Roles | None = Roles.AUTO
    prefill: Callable[[Site], PrefillPolicy] = lambda site: site.groups
    order: PrefillOrder | None = None
    link_bytes_per_s: int | None = None
    host_bytes_per_s: int | None = None
    switch_ns: int | None = None
    equal_copies: bool = False  # a simulated link is shared by all its copies alike, whatever they are for
    divides_memory: bool = False  # among so many instances: none can join
    placement: Callable[[Site], PlacementPolicy] | None = None  # of models, where they move; None: they do not
    rated: bool = False  # it places models by their expected rates
    lanes: bool = False  # it is made for devices that are divided
    one_model: bool = False  # its paper serves one
    profiled: bool = False  # a simulated device was profiled before, for guards
    by_layers: bool = False  # a simulated engine can stop a prefill between two layers, at no cost
    give_up_ns: int | None = None  # a request without a token after so long fails when the next one arrives

    def roles_of(self, asked: Roles | None, *, counted: bool) -> Roles:
        """The roles that were asked for, else those that the policy is made for, else fixed ones if prefill and decode
        instances were `counted`."""
        return asked or self.roles or (Roles.FIXED if counted else Roles.AUTO)


PLACEMENTS: Mapping[str, Callable[[Site], PlacementPolicy]] = {
    "pressure": lambda site: Pressure(),
    "kvpr": lambda site: KvPressureRatio(),
}
"""The policies of placement by name: ours and Prism's."""
UNMOVED = "none"
"""No placement: models stay, also where moving them is part of the scheduler."""


def placement(name: str) -> Callable[[Site], PlacementPolicy] | None:
    """Raises UserError."""
    if name not in (*PLACEMENTS, UNMOVED):
        known = ", ".join((*PLACEMENTS, UNMOVED))
        raise UserError(f"unknown placement {name!r}; expected one of {known}", param="placement")
    return PLACEMENTS.get(name)


def recipe(name: str, *, as_published: bool = False) -> Recipe:
    """`as_published`: with the settings of its paper's public artifact, where there is one. Raises UserError."""
    known = RECIPES.get(name)
    if known is None:
        near = get_close_matches(name, RECIPES, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(RECIPES)}"
        raise UserError(f"unknown policy {name!r}; {hint}", param="policy")
    return _as_published(known) if as_published else known


def with_step_tokens(policy: Policy, tokens: int, name: str) -> Policy:
    """The policy with at most so many tokens of prompts in a step. Raises UserError if it never cuts a prompt."""
    if policy.rules.chunk_tokens is None:
        raise UserError(f"policy {name!r} runs prompts as a whole, however long: leave out step_tokens", param="policy")
    made: Any = policy
    return cast(Policy, replace(made, rules=replace(policy.rules, step_tokens=tokens)))


def published(name: str) -> bool:
    """Whether the policy has a published setting."""
    return name in _PUBLISHED or name in _PUBLISHED_LANES


def _as_published(known: Recipe) -> Recipe:
    if known.name in _PUBLISHED_LANES:
        return replace(known, policy=_PUBLISHED_LANES[known.name], profiled=True, by_layers=True)
    published = _PUBLISHED.get(known.name)
    if published is None:
        raise UserError(f"policy {known.name!r} has no published setting", param="policy")
    return replace(
        known,
        policy=published,
        link_bytes_per_s=_PUBLISHED_BYTES_PER_S,
        host_bytes_per_s=0,
        switch_ns=0,
        equal_copies=True,
        give_up_ns=15 * NS_PER_S,
    )


RECIPES: Mapping[str, Recipe] = {
    known.name: known
    for known in (
        Recipe(
            name="aegaeon",
            about="prefill and decode pools, token-level switching (Aegaeon)",
            policy=lambda site: site.turns,
            roles=Roles.FIXED,
        ),
        Recipe(
            name="least-slack",
            about="who would be late first runs next",
            policy=lambda site: LeastSlack(),
            roles=None,
            prefill=lambda site: _PREFILLS,
            order=_PREFILLS,
            placement=PLACEMENTS["pressure"],
            lanes=True,
        ),
        Recipe(
            name="serverlessllm",
            about="request-level switching, first come first served (ServerlessLLM)",
            policy=lambda site: ServerlessLlm(),
        ),
        Recipe(
            name="serverlessllm-oracle-sjf",
            about="request-level switching, shortest job first with known lengths (ServerlessLLM+)",
            policy=lambda site: ServerlessLlmOracleSjf(site.oracle()),
        ),
        Recipe(
            name="qlm",
            about="groups of requests of one model, swapped when a first token would be late (QLM-like)",
            policy=lambda site: Qlm(),
        ),
        Recipe(
            name="muxserve",
            about="several models resident on each device, in turns, none evicted (MuxServe-like)",
            policy=lambda site: MuxServe(site.memory_bytes * 3 // 4),
            switch_ns=0,  # each model has an engine of its own there
            divides_memory=True,
        ),
        Recipe(
            name="prism",
            about="models share devices, placed by KV pressure; prompts by slack; idle ones leave (Prism)",
            policy=lambda site: Prism(),
            switch_ns=0,  # each model has an engine of its own there
            placement=PLACEMENTS["kvpr"],
        ),
        Recipe(
            name="s-partition",
            about="models placed by rate for good, each with a fixed part of its device's memory (Prism's S-Partition)",
            policy=lambda site: StaticPlaces(site.memory_bytes * 3 // 4, site.rates, rules=DIVIDED_KV),
            switch_ns=0,
            divides_memory=True,
            rated=True,
        ),
        Recipe(
            name="muxserve++",
            about="models placed by rate for good, and the rest of the memory for all of them (Prism's MuxServe++)",
            policy=lambda site: StaticPlaces(site.memory_bytes * 3 // 4, site.rates),
            switch_ns=0,
            divides_memory=True,
            rated=True,
        ),
        Recipe(
            name="muxwise",
            about="prefill and decode side by side on parts of one device (MuxWise)",
            policy=lambda site: MuxWise(site.turns),
            lanes=True,
            one_model=True,
        ),
        Recipe(
            name="chunked-prefill",
            about="a chunk of a prompt in each step of the decode, by a budget of tokens (Sarathi-Serve)",
            policy=lambda site: ChunkedPrefill(site.turns),
            one_model=True,
        ),
        Recipe(
            name="dedicated",
            about="one model per instance",
            policy=lambda site: Dedicated(),
        ),
        Recipe(
            name="prefill-first",
            about="token-level switching, prefill and decode on the same instances, prefills first (Aegaeon, Fig. 6a)",
            policy=lambda site: PrefillFirst(site.turns),
        ),
        Recipe(
            name="decode-first",
            about="token-level switching, prefill and decode on the same instances, decodes first (Aegaeon, Fig. 6b)",
            policy=lambda site: DecodeFirst(site.turns),
        ),
    )
}

_PUBLISHED: Mapping[str, Callable[[Site], Policy]] = {
    "aegaeon": lambda site: WeightedRoundRobin(switching_share=0.0),
    "serverlessllm": lambda site: ServerlessLlmAsPublished(),
    "serverlessllm-oracle-sjf": lambda site: ServerlessLlmOracleSjfAsPublished(site.oracle()),
    "muxserve": lambda site: MuxServe(site.memory_bytes * 3 // 4, models_max=2),
}

_PUBLISHED_LANES: Mapping[str, Callable[[Site], Policy]] = {
    "muxwise": lambda site: MuxWise(site.turns, piece_steps=1),
}
"""One model on a device that is divided: the settings of Aegaeon's artifact do not matter there."""
