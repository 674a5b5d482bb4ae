"""A model as the catalogue has it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path

from aegis.core.ids import InstanceId
from aegis.core.limits import UNLIMITED, Limits
from aegis.core.model import ModelSpec, Pace
from aegis.models.disk_cache import Hold, use
from aegis.models.sources import Source
from aegis.models.text.text_model import TextModel
from aegis.node.image_caches import ImageCaches
from memory.image_cache import State
from proxy.routing.events import ModelUp

_USE_NS = 1_000_000_000
"""So often the cache on disk is told that a model is used."""


@dataclass(slots=True)
class CatalogueModel:
    """Implements `proxy.http.market.Served`. `bound` are the instances that have its parameters bound, `refused_by`
    those that could not bind them and are told of it again once its image, or that of its base, is there."""

    spec: ModelSpec
    source: Source
    images: ImageCaches
    text: TextModel | None
    kv_limit_tokens: int  # of a request
    device_tokens: int  # whose KV a device holds beside the weights
    created_s: int = field(default_factory=lambda: int(time.time()))
    state: str = "loading"
    detail: str = ""
    priority: int = 0
    limits: Limits = UNLIMITED
    pace: Pace | None = None
    bound: set[InstanceId] = field(default_factory=set)
    refused_by: set[InstanceId] = field(default_factory=set)
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    renewing: bool = False
    damage: str = ""
    renewals: int = 0
    hold: Hold | None = None  # of its image on disk
    used_ns: int = 0  # as the cache on disk was told
    away: bool = False  # its requests wait for the image to be made again, and for all instances to have it

    @property
    def up(self) -> ModelUp:
        """The event that tells proxies that the model is ready."""
        return ModelUp(self.spec, self.device_tokens)

    @property
    def pinned(self) -> bool:
        return self.images.pinned(self.spec.model)

    @property
    def weights(self) -> str:
        state = self.images.state(self.spec.model)
        return "disk" if state is State.ABSENT else state.value

    @property
    def has_left(self) -> bool:
        """Whether its image had to make room on disk for others."""
        return self.source.lazy and not Path(self.spec.image_path).exists()

    def used_on_disk(self, now_ns: int) -> None:
        """What is held needs no telling."""
        if self.hold is None and now_ns - self.used_ns > _USE_NS:
            self.used_ns = now_ns
            use(Path(self.spec.directory))
