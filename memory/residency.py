"""Which models' weights are on the device: absent, loading (activated or prefetched) or resident.

Laws: (R1) a model that is not absent owns exactly the pages its image needs, an absent one none; (R2) a loading model
is never a victim, for its pages are the target of a transfer (rule 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aegis.core.errors import LawBroken
from aegis.core.ids import ModelId, PageId
from aegis.core.request import EventHandle
from memory.bump import BumpBuffer
from memory.pages import NoPages, PagePool


@dataclass(slots=True)
class _Weights:
    pages: tuple[PageId, ...] = ()
    loading: EventHandle | None = None


@dataclass(frozen=True, slots=True)
class Admitted:
    """Pages for a model, and the models that had to leave for it."""

    pages: tuple[PageId, ...]
    evicted: tuple[ModelId, ...]


class Residency:
    """Counts weights on one device; which model should be there is the caller's decision."""

    __slots__ = ("_pool", "_ranges", "_weights")

    def __init__(self, pool: PagePool, ranges: BumpBuffer) -> None:
        self._pool = pool
        self._ranges = ranges
        self._weights: dict[ModelId, _Weights] = {}

    def add(self, model: ModelId) -> None:
        self._weights[model] = _Weights()

    def remove(self, model: ModelId) -> None:
        assert self._weights[model].loading is None
        self.evict(model)
        del self._weights[model]

    def is_resident(self, model: ModelId) -> bool:
        weights = self._weights[model]
        return bool(weights.pages) and weights.loading is None

    def is_loading(self, model: ModelId) -> bool:
        return self._weights[model].loading is not None

    def loading(self) -> list[tuple[ModelId, EventHandle]]:
        return [(model, w.loading) for model, w in self._weights.items() if w.loading is not None]

    def resident(self) -> tuple[ModelId, ...]:
        return tuple(model for model in self._weights if self.is_resident(model))

    def admit(self, model: ModelId, expendable: Sequence[ModelId], *, spare: int = 0) -> Admitted | NoPages:
        """Takes the model's pages, evicting resident models from `expendable`, first ones first, as far as needed.

        All or nothing; `spare` pages must remain free besides.
        """
        weights, wanted = self._weights[model], self._ranges.pages(model)
        assert not weights.pages
        victims = [m for m in expendable if m != model and self.is_resident(m)]
        free = self._pool.free + sum(len(self._weights[m].pages) for m in victims)
        if wanted + spare > free:
            return NoPages(wanted + spare, free)
        evicted: list[ModelId] = []
        for victim in victims:
            if self._pool.free >= wanted + spare:
                break
            self.evict(victim)
            evicted.append(victim)
        pages = self._pool.take(model, wanted)
        assert not isinstance(pages, NoPages)
        weights.pages = pages
        return Admitted(pages, tuple(evicted))

    def start_loading(self, model: ModelId, event: EventHandle) -> None:
        self._weights[model].loading = event

    def loaded(self, model: ModelId) -> None:
        self._weights[model].loading = None

    def evict(self, model: ModelId) -> None:
        """Gives the model's pages back."""
        weights = self._weights[model]
        assert weights.loading is None, "a loading model is the target of a transfer"
        if weights.pages:
            self._pool.give(model, weights.pages)
            weights.pages = ()

    def check(self) -> None:
        for model, weights in self._weights.items():
            if weights.pages and len(weights.pages) != self._ranges.pages(model):
                raise LawBroken(f"R1: {model} holds {len(weights.pages)} pages of {self._ranges.pages(model)}")
            if weights.loading is not None and not weights.pages:
                raise LawBroken(f"R1: {model} is loading into no pages")
            if any(self._pool.owner(page) != model for page in weights.pages):
                raise LawBroken(f"R1: a page of {model} is not its own")
