"""A model as the catalogue has it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from aegis.core.ids import InstanceId
from aegis.core.limits import UNLIMITED, Limits
from aegis.core.model import ModelSpec
from aegis.models.disk_cache import Hold
from aegis.models.sources import Source
from aegis.models.text.text_model import TextModel
from aegis.node.image_caches import ImageCaches
from memory.image_cache import State


@dataclass(slots=True)
class CatalogueModel:
    """Implements `proxy.http.market.Served`. `bound` are the instances that have its parameters bound."""

    spec: ModelSpec
    source: Source
    images: ImageCaches
    text: TextModel | None
    kv_limit_tokens: int
    created_s: int
    state: str = "loading"
    detail: str = ""
    priority: int = 0
    limits: Limits = UNLIMITED
    bound: set[InstanceId] = field(default_factory=set)
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    renewing: bool = False
    damage: str = ""
    renewals: int = 0
    hold: Hold | None = None  # of its image on disk
    used_ns: int = 0  # as the cache on disk was told
    away: bool = False  # its requests wait for the image to be made again

    @property
    def pinned(self) -> bool:
        return self.images.pinned(self.spec.model)

    @property
    def weights(self) -> str:
        state = self.images.state(self.spec.model)
        return "disk" if state is State.ABSENT else state.value
