"""Residency: the models whose weights are on the device are loading (activated or prefetched) or resident.

A load that is not wanted any more is abandoned: its pages come back when its event has passed.

Laws: (R1) a model that is not absent owns exactly the pages its image needs, an absent one none; (R2) a loading model
is never a victim, because its pages are the target of a transfer (rule 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import Struct

from aegis.core.errors import LawBroken
from aegis.core.ids import ModelId
from aegis.core.request import EventHandle
from memory.bump_buffer import BumpBuffer
from memory.pages import NoPages, PagePool, Runs, count_pages


@dataclass(slots=True)
class _Weights:
    runs: Runs = ()
    abandoned: bool = False


class WeightsAdmitted(Struct, frozen=True):
    """Pages for a model, and the models that had to leave for it."""

    runs: Runs
    evicted: tuple[ModelId, ...]


class Residency:
    """Counts weights on one device; which model should be there is the caller's decision."""

    __slots__ = ("_loading", "_pool", "_ranges", "_resident", "_weights")

    def __init__(self, pool: PagePool, ranges: BumpBuffer) -> None:
        self._pool = pool
        self._ranges = ranges
        self._weights: dict[ModelId, _Weights] = {}
        self._resident: dict[ModelId, None] = {}  # in the order of their last use, or of their arrival
        self._loading: dict[ModelId, EventHandle] = {}

    def add(self, model: ModelId) -> None:
        self._weights[model] = _Weights()

    def remove(self, model: ModelId) -> None:
        self.evict(model)
        del self._weights[model]

    def is_resident(self, model: ModelId) -> bool:
        return model in self._resident

    def is_loading(self, model: ModelId) -> bool:
        return model in self._loading

    def loading(self) -> list[tuple[ModelId, EventHandle]]:
        return list(self._loading.items()) if self._loading else []

    def used(self, model: ModelId) -> None:
        """Makes the resident model the most recently used one."""
        del self._resident[model]
        self._resident[model] = None

    def resident(self) -> tuple[ModelId, ...]:
        """The least recently used one first."""
        return tuple(self._resident)

    def admit(self, model: ModelId, expendable: Sequence[ModelId], *, spare: int = 0) -> WeightsAdmitted | NoPages:
        """Takes the model's pages, evicting resident models from `expendable`, first ones first, as far as needed.

        All or nothing; `spare` pages must remain free besides.
        """
        weights, wanted = self._weights[model], self._ranges.pages(model)
        assert not weights.runs
        victims = [m for m in expendable if m != model and m in self._resident]
        free = self._pool.free + sum([self._ranges.pages(m) for m in victims])
        if wanted + spare > free:
            return NoPages(wanted + spare, free)
        evicted: list[ModelId] = []
        for victim in victims:
            if self._pool.free >= wanted + spare:
                break
            self.evict(victim)
            evicted.append(victim)
        runs = self._pool.take(model, wanted)
        assert not isinstance(runs, NoPages)
        weights.runs = runs
        self._resident[model] = None
        return WeightsAdmitted(runs, tuple(evicted))

    def start_loading(self, model: ModelId, event: EventHandle) -> None:
        del self._resident[model]
        self._loading[model] = event

    def abandon(self, model: ModelId) -> EventHandle:
        """The model, which is loading, is not wanted any more. Returns the event after which its pages are free."""
        assert model in self._loading
        self._weights[model].abandoned = True
        return self._loading[model]

    def is_abandoned(self, model: ModelId) -> bool:
        return self._weights[model].abandoned

    def loaded(self, model: ModelId) -> bool:
        """The load's event has passed. False if it was abandoned: then the model is to be evicted."""
        weights = self._weights[model]
        wanted = not weights.abandoned
        weights.abandoned = False
        del self._loading[model]
        self._resident[model] = None
        return wanted

    def evict(self, model: ModelId) -> None:
        """Gives the model's pages back."""
        weights = self._weights[model]
        assert model not in self._loading, "a loading model is the target of a transfer"
        if weights.runs:
            self._pool.give(model, weights.runs)
            weights.runs = ()
            self._resident.pop(model, None)

    def check(self) -> None:
        for model, weights in self._weights.items():
            pages = count_pages(weights.runs)
            if pages and pages != self._ranges.pages(model):
                raise LawBroken(f"R1: {model} holds {pages} pages of {self._ranges.pages(model)}")
            if bool(pages) != (model in self._loading or model in self._resident):
                raise LawBroken(f"R1: {model} holds {pages} pages, and is neither loading nor resident with them")
            if self._pool.held(model) != pages:
                raise LawBroken(f"R1: {self._pool.held(model)} pages are booked for {model}, it holds {pages}")
