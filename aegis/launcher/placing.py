"""Places models on instances, and moves them with their requests, as `proxy.routing.placement` decides."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from msgspec.structs import replace

from aegis.core.clock import NS_PER_S, Clock
from aegis.core.errors import UserError
from aegis.core.estimators import Hardware
from aegis.core.ids import ModelId
from aegis.core.messages import UnloadModel
from aegis.core.role import Role
from aegis.node.node import Node
from aegis.process.tasks import watched
from aegis.telemetry.logs import log
from aegis.telemetry.model_counts import Tally
from proxy.routing.events import ModelMoved, MoveModel, PlacesSet
from proxy.routing.placement import LOOK_NS, Event, Evict, Placement, PoolSampled
from proxy.routing.placement_views import InstanceView, PlacementPolicy
from proxy.routing.pool_sample import ModelSample
from proxy.routing.router import Router

_logger = logging.getLogger(__name__)


class Placing:
    """`router` is that of the proxy in the node's process, which is told of the others' requests. Without a policy
    nothing moves; weights of models that were idle for `idle_ns` leave, if it is said."""

    def __init__(
        self,
        node: Node,
        router: Router,
        policy: PlacementPolicy | None,
        hardware: Hardware,
        clock: Clock,
        *,
        idle_ns: int | None = None,
    ) -> None:
        self._node = node
        self._router = router
        self._clock = clock
        self._placement = Placement(policy, hardware, idle_ns=idle_ns)
        self._tallies: dict[ModelId, Tally] = {}  # as they were looked at last
        self._came: dict[ModelId, tuple[int, int]] = {}  # of models that serve: requests, and tokens of their prompts
        self._moving: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Runs until it is cancelled."""
        try:
            while True:
                await asyncio.sleep(LOOK_NS / NS_PER_S)
                self._on(self._sample())
        finally:
            if self._moving:
                self._moving.cancel()

    def _on(self, event: Event) -> None:
        for effect in self._placement.on(event, self._clock.now_ns()):
            match effect:
                case MoveModel():
                    self._moving = watched(self._move(effect))
                case PlacesSet(model, instances):
                    if instances:
                        told = {"model": model, "instances": ",".join(instances), "why": self._placement.because}
                        log(_logger, logging.INFO, "requests of a model go elsewhere", told)
                    self._node.moves.set_places(effect)
                case Evict(model, instance):
                    self._node.post(instance, UnloadModel(model))

    def _sample(self) -> PoolSampled:
        """Nothing where an instance that is to serve is away: what there is, is not known then."""
        node = self._node
        models, loads = self._router.sample()
        decodes = {name for name, role in node.pool.staying().items() if role is not Role.PREFILL}
        if decodes != loads.keys():
            return PoolSampled((), ())
        devices = node.devices
        views = [
            InstanceView(name, devices.numbers(name), devices.page_count * devices.page_bytes, placed)
            for name, placed in loads.items()
        ]
        return PoolSampled(self._counted(models), tuple(views))

    def _counted(self, models: Sequence[ModelSample]) -> tuple[ModelSample, ...]:
        """With the requests of all proxies, and with those for a model's adapters, since it has been there."""
        served = self._node.catalogue.models()
        for name, tally in self._node.proxies.tallies().items():
            before, self._tallies[name] = self._tallies.get(name, Tally(name)), tally
            base = served[name].spec.base or name if name in served else name
            requests, tokens = self._came.get(base, (0, 0))
            came = tally.arrived - before.arrived, tally.prompt_tokens - before.prompt_tokens
            self._came[base] = requests + came[0], tokens + came[1]
        self._came = {each.model: self._came.get(each.model, (0, 0)) for each in models}
        counted = [(each, *self._came[each.model]) for each in models]
        return tuple([replace(each, requests=requests, prompt_tokens=tokens) for each, requests, tokens in counted])

    async def _move(self, move: MoveModel) -> None:
        told = {"model": move.model, "instance": move.target, "why": self._placement.because}
        log(_logger, logging.INFO, "a model moves", told)
        try:
            done: ModelMoved = await self._node.moves.move(move, "placement")
        except UserError as refused:
            log(_logger, logging.INFO, "a model has not moved", told | {"reason": refused.message})
            failed = ModelMoved(move.model, move.target, 0, 0, refused.message)
            # What it answers would undo where the operator's move lets requests go.
            self._placement.on(failed, self._clock.now_ns())
            return
        log(_logger, logging.INFO, "a model has moved", told | {"moved": done.moved, "replayed": done.replayed})
        self._on(done)
