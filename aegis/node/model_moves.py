"""Moves of models with their requests, which every proxy makes of its own."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from itertools import count

from msgspec.structs import replace

from aegis.core.errors import UserError
from aegis.core.ids import InstanceId, ModelId, ProxyId
from aegis.node.proxy_links import ProxyLinks
from aegis.telemetry.metrics.moves import Cause, MoveMetrics
from proxy.routing.events import ModelMoved, MoveModel, PlacesSet


@dataclass(slots=True)
class _Under:
    """A move under way, as far as proxies have answered."""

    number: int
    waiting: set[ProxyId]
    cause: Cause
    over: asyncio.Event = field(default_factory=asyncio.Event)
    moved: int = 0
    replayed: int = 0
    why: str = ""
    kv_tokens: int = 0


class ModelMoves:
    """Those of one node. A proxy that joins later is told where requests go since the last ones."""

    def __init__(self, proxies: ProxyLinks, metrics: MoveMetrics) -> None:
        self._proxies = proxies
        self._metrics = metrics
        self._numbers = count()
        self._under_way: dict[ModelId, _Under] = {}
        self._places: dict[ModelId, tuple[InstanceId, ...]] = {}

    async def move(self, message: MoveModel, cause: Cause) -> ModelMoved:
        """Returns when all proxies have answered. Raises UserError if the model is being moved already."""
        model = message.model
        if model in self._under_way:
            raise UserError(f"{model} is being moved already; try again when that is done")
        under = self._under_way[model] = _Under(next(self._numbers), set(self._proxies.addresses()), cause)
        before = self._places.get(model, ())
        places = self._places[model] = message.places or (message.target,)
        self._metrics.begun(model, cause)
        try:
            self._proxies.broadcast(replace(message, number=under.number))
            if under.waiting:
                await under.over.wait()
        finally:
            del self._under_way[model]
            self._metrics.ended(model, cause, done=not under.waiting and not under.why)
        if under.why and self._places.get(model) is places:  # they may have been set anew, or the model removed
            self.set_places(PlacesSet(model, before))  # also at proxies that have moved some requests
        return ModelMoved(model, message.target, under.moved, under.replayed, under.why, under.kv_tokens, under.number)

    def set_places(self, message: PlacesSet) -> None:
        if message.instances:
            self._places[message.model] = message.instances
        else:
            self._places.pop(message.model, None)
        self._proxies.broadcast(message)

    def answered(self, proxy: ProxyId, answer: ModelMoved) -> None:
        under = self._under_way.get(answer.model)
        # One that nobody waits for any more is answered all the same, and its answer is not that of the next one.
        if under and answer.number == under.number and proxy in under.waiting:
            under.moved += answer.moved
            under.replayed += answer.replayed
            under.kv_tokens += answer.kv_tokens
            under.why = under.why or answer.why
            self._metrics.moved(
                answer.model,
                under.cause,
                with_kv=answer.moved,
                prefilled=answer.replayed,
                kv_tokens=answer.kv_tokens,
            )
            self._discard(under, proxy)

    def places(self) -> list[PlacesSet]:
        """Where requests go, as it was last set."""
        return [PlacesSet(model, instances) for model, instances in self._places.items()]

    def removed(self, model: ModelId) -> None:
        self._places.pop(model, None)

    def left(self, proxy: ProxyId) -> None:
        """The proxy is lost, and with it all its requests."""
        for under in self._under_way.values():
            self._discard(under, proxy)

    def _discard(self, under: _Under, proxy: ProxyId) -> None:
        under.waiting.discard(proxy)
        if not under.waiting:
            under.over.set()
