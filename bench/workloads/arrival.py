"""One request of a workload, and the order of many."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from aegis.core.ids import ModelId


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request as it comes in, `at_ns` after the start of the workload. Lower `priority` is sooner, as in the API.
    The KV of its first `reused_tokens` is there, where what serves it says so."""

    at_ns: int
    model: ModelId
    input_tokens: int
    output_tokens: int
    priority: int = 0
    reused_tokens: int = 0  # of the input, of earlier turns


def model_name(index: int) -> ModelId:
    """`m000`, `m001`, …: what generated workloads call their models."""
    return ModelId(f"m{index:03d}")


def in_order(arrivals: Iterable[Arrival]) -> list[Arrival]:
    """The arrivals by time, then model, then order of making."""
    return sorted(arrivals, key=lambda arrival: (arrival.at_ns, arrival.model))
