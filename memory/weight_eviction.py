"""Weights that leave an instance's device for others, each with its reason where reasons are asked for.

Which may go, and in which order, the cores decide: they hand over `victims`, those that may go first coming first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from aegis.core.decision import Decision
from aegis.core.ids import ModelId
from aegis.core.messages import TakeBack
from memory.ledger import Ledger
from memory.pages import NoPages


class WeightReasons(Protocol):
    """Explains why weights leave."""

    def weights(self, victim: ModelId, spared: ModelId | None, needed: ModelId | None) -> Decision:
        """The weights of the `victim` have left for the `needed` model; None: for another instance. `spared` would have
        been next to go."""
        ...


class WeightEviction:
    """Evicts weights of one instance, on the accounts of its ledger."""

    def __init__(self, ledger: Ledger, reasons: WeightReasons | None) -> None:
        self._ledger = ledger
        self._reasons = reasons

    def load(self, model: ModelId, victims: Sequence[ModelId], *, spare: int = 0, prefetch: bool = False) -> bool:
        """Whether the model's weights are on their way now, for which victims may have left. `spare` pages remain
        free."""
        started = not isinstance(self._ledger.load(model, victims, spare=spare, prefetch=prefetch), NoPages)
        for at, victim in enumerate(victims if self._reasons else ()):
            if not self._ledger.weights.is_resident(victim):
                self._explain(victims, at, model)
        return started

    def evict(self, victims: Sequence[ModelId], at: int, needed: ModelId | None) -> None:
        """Victim number `at`, for the `needed` model; None: for another instance."""
        self._ledger.evict(victims[at])
        if self._reasons:
            self._explain(victims, at, needed)

    def evict_all(self, victims: Sequence[ModelId], needed: ModelId | None) -> None:
        for at in range(len(victims)):
            self.evict(victims, at, needed)

    def give_back(self, asked: TakeBack, idle: Sequence[ModelId], now_ns: int) -> None:
        """Gives back pages that the node asks for. If it asks gently, only weights of `idle` models leave for that."""
        balloon = self._ledger.balloon
        if asked.gentle:
            for at in range(len(idle)):
                if self._ledger.pool.free >= min(asked.pages, balloon.staying - asked.keep):
                    break
                self.evict(idle, at, None)
        balloon.take_back(asked, now_ns)

    def abandon(self, models: Iterable[ModelId]) -> int:
        """Gives up loads that are under way for later; returns how many had not been given up before."""
        abandoned = [model for model in models if not self._ledger.weights.is_abandoned(model)]
        for model in abandoned:
            self._ledger.abandon(model)
        return len(abandoned)

    def _explain(self, victims: Sequence[ModelId], at: int, needed: ModelId | None) -> None:
        assert self._reasons
        spared = next((model for model in victims[at + 1 :] if self._ledger.weights.is_resident(model)), None)
        self._ledger.effects.append(self._reasons.weights(victims[at], spared, needed))
