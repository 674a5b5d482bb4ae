"""Small pools that are short of something, and what arrives there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from aegis.core.clock import NS_PER_MS, NS_PER_S
from aegis.core.model import ModelSpec, Slo
from aegis.core.rng import Stream
from aegis.core.role import Roles
from aegis.core.views import Renewal, TurnRules
from aegis.policies import Recipe, Site, recipe
from aegis.sim.faults.fake_models import make_spec
from aegis.sim.gpu_costs import GpuSpec
from aegis.sim.market import SimRequest
from aegis.sim.simulation import PAGE_BYTES, Pool
from aegis.sim.step_costs import StepCosts
from decode.policies.least_slack import LeastSlack
from proxy.routing.events import MoveModel
from proxy.routing.placement_views import PlacementPolicy

_UP_NS = 200 * NS_PER_MS  # live instances have come up


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Sizes in pages; `leaving` of 100 clients lose interest."""

    prefills: int = 1
    decodes: int = 1
    pages: int = 40
    host_slabs: int = 64
    models: int = 4
    requests: int = 30
    leaving: int = 0
    over_s: int = 10
    prompt_max: int = 300
    token_us: int = 100  # of a prefill
    message_us: int = 100
    devices: int | None = None
    idle_ns: int | None = None
    policy: str = "aegaeon"
    roles: Roles | None = None  # as the policy is made for
    chunk_tokens: int | None = None  # the shortest piece of prefills that least slack cuts; None: its own
    whole: bool = False  # it cuts none
    reuses: bool = False  # all prompts are alike, as far as they go
    moves: int = 0  # of models, by users
    placement: Callable[[Site], PlacementPolicy] | None = None  # of models, by load

    @property
    def watched(self) -> bool:
        """Whether instances are trimmed, or share a device."""
        return self.idle_ns is not None or self.devices is not None

    def pool(self) -> Pool:
        specs = tuple(self._spec(index) for index in range(self.models))
        chosen = recipe(self.policy)
        if self.chunk_tokens is not None or self.whole:
            rules = TurnRules(renewal=Renewal.ARRIVAL, chunk_tokens=self.chunk_tokens)
            chosen = replace(chosen, policy=lambda site: LeastSlack(rules=rules))
        chosen = replace(chosen, placement=self.placement)
        return Pool(
            gpu=self._gpu(specs),
            specs=specs,
            **self._instances(chosen),
            devices=self.devices,
            idle_ns=self.idle_ns,
            recipe=chosen,
            slab_bytes=PAGE_BYTES,
            host_kv_bytes=self.host_slabs * PAGE_BYTES,
            keep_times=True,
            explains=True,
            reuses=self.reuses,
        )

    def _instances(self, chosen: Recipe) -> dict[str, int]:
        if chosen.roles_of(self.roles, counted=False) is Roles.AUTO:
            return {"mixed": self.prefills + self.decodes}
        return {"prefills": self.prefills, "decodes": self.decodes}

    def arrivals(self, seed: int) -> list[SimRequest]:
        draw = Stream(seed, "parity")
        arrivals = []
        for at_ns in sorted(_UP_NS + draw.below(self.over_s * NS_PER_S) for _ in range(self.requests)):
            model = self._spec(draw.below(self.models)).model
            leaves_ns = at_ns + draw.below(4 * NS_PER_S) if draw.below(100) < self.leaving else None
            prompt, output = 1 + draw.below(self.prompt_max), 1 + draw.below(200)
            arrivals.append(SimRequest(at_ns, model, prompt, output, leaves_ns))
        return arrivals

    def orders(self, seed: int) -> list[tuple[int, MoveModel]]:
        draw, names = Stream(seed, "parity", "moves"), list(self.pool().instances())
        targets = [name for name in names if not name.startswith("prefill")]
        orders = []
        for at_ns in sorted(_UP_NS + draw.below(self.over_s * NS_PER_S) for _ in range(self.moves)):
            model = self._spec(draw.below(self.models)).model
            orders.append((at_ns, MoveModel(model, targets[draw.below(len(targets))])))
        return orders

    def _spec(self, index: int) -> ModelSpec:
        slo = Slo(ttft_ns=NS_PER_S, tbt_ns=100 * NS_PER_MS)
        return make_spec(index, image_pages=8 + index % 3, block_bytes=PAGE_BYTES >> 2 + index % 2, slo=slo)

    def _gpu(self, specs: tuple[ModelSpec, ...]) -> GpuSpec:
        """Steps last whole nanoseconds, so that each ends when the run of which it is one says."""
        return GpuSpec(
            name="small",
            memory_bytes=self.pages * PAGE_BYTES,
            in_bytes_per_s=300_000_000,
            out_bytes_per_s=200_000_000,
            host_bytes_per_s=700_000_000,
            gpus_per_node=8,
            memory_bytes_per_s=10**11,
            flops_per_s=10**12,
            switch_ns=0,
            handover_ns=2 * (self.message_us * 1000 + 1),
            fits={spec.model: _costs(index, self.token_us) for index, spec in enumerate(specs)},
        )


def _costs(index: int, token_us: int) -> StepCosts:
    return StepCosts(
        decode_ps=(8_000_011 + index * 1_000_003) * 1000,
        context_token_ps=1_009 * 1000,
        row_ps=100_003 * 1000,
        prefill_ps=20_000_003 * 1000,
        token_ps=(token_us * 1000 + 19) * 1000,
    )
