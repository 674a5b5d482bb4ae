"""What policies see, and the shape of their answers. Views hold no true output length (rule 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from aegis.core.estimators import Latency
from aegis.core.ids import InstanceId, ModelId

MAX_BATCH = 64
"""Sequences in a decode batch, whatever room there is."""


@dataclass(frozen=True, slots=True)
class GroupView:
    """Jobs of one model that run in a row. `size` is cumulative: running a job does not lower it."""

    group: int
    model: ModelId
    size: int
    waiting_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class QueueView:
    """A prefill instance's queue, front first, and the model that is running there."""

    instance: InstanceId
    groups: tuple[GroupView, ...]
    running: ModelId | None


@dataclass(frozen=True, slots=True)
class PrefillPlacement:
    """`group` None: a new group at the end of the instance's queue."""

    instance: InstanceId
    group: int | None


class PrefillPolicy(Protocol):
    def place(
        self, model: ModelId, queues: Sequence[QueueView], latency: Mapping[ModelId, Latency]
    ) -> PrefillPlacement:
        """Where an arriving request goes. `queues` is not empty and in order of instance."""
        ...


@dataclass(frozen=True, slots=True)
class ListView:
    """A decode instance's work list: how long it is, and which models have a batch with room."""

    instance: InstanceId
    batches: int
    open_models: frozenset[ModelId]


class DecodePolicy(Protocol):
    def place(self, model: ModelId, lists: Sequence[ListView]) -> InstanceId:
        """Where a prefilled request goes on. `lists` is not empty and in order of instance."""
        ...


@dataclass(frozen=True, slots=True)
class BatchView:
    """A batch at the start of a round."""

    batch: int
    model: ModelId
    step_ns: int  # estimated time of one decode step
    tbt_ns: int
    switch_ns: int  # estimated time to bring the model in


@dataclass(frozen=True, slots=True)
class Turn:
    batch: int
    quota_ns: int


class RoundPolicy(Protocol):
    def plan(self, batches: Sequence[BatchView]) -> list[Turn]:
        """Orders the work list for a round and gives every batch its quota. `batches` is in the list's order."""
        ...
