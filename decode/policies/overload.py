"""The batches that are kept on time where not all can be: those that make the most tokens on time per second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aegis.core.views import BatchView
from decode.slack import begin_by_ns


@dataclass(frozen=True, slots=True)
class Shedding:
    """When each batch counts as having to begin, by number, and the batches that are not `kept` on time."""

    by_ns: dict[int, int]
    shed: frozenset[int]


def shedding(batches: Sequence[BatchView], quantum_ns: int, shed_share: float) -> Shedding:
    """To be on time a batch needs a step in every TBT, the change to it in every quantum, and its prefills in every
    TTFT. `1 - shed_share` of the time is given to batches in the order of their tokens on time per second of it, the
    densest in any case; the others are shed.

    A batch that is kept counts by its first token that can still be on time; where there is none, by its last turn. One
    that is shed counts by its last turn, or by its deadline if it had none, and so many quanta later that turns of all
    batches in a row take `shed_share` of the time: nobody waits longer than that for lack of worth.
    """
    floor_ns = shed_for_ns(len(batches), quantum_ns, shed_share)
    by_ns: dict[int, int] = {}
    shed: list[int] = []
    room, densest = 1 - shed_share, [(_needs(batch, quantum_ns), batch) for batch in batches]
    densest.sort(key=_density, reverse=True)
    for needs, batch in densest:
        deadline_ns = begin_by_ns(batch)
        had_ns = batch.ran_ns if batch.ran_ns >= 0 else deadline_ns
        last_ns = max(had_ns + floor_ns, deadline_ns)
        if needs > room and by_ns:
            shed.append(batch.batch)
            by_ns[batch.batch] = last_ns
            continue
        room -= needs
        in_time_ns = batch.in_time_by_ns
        by_ns[batch.batch] = max(had_ns, deadline_ns) if in_time_ns is None else min(in_time_ns, last_ns)
    return Shedding(by_ns, frozenset(shed))


def shed_for_ns(batches: int, quantum_ns: int, shed_share: float) -> int:
    """The longest time between two turns of a batch that is shed."""
    return round(batches * quantum_ns / shed_share)


def _needs(batch: BatchView, quantum_ns: int) -> float:
    """The share of the time with which the batch is on time."""
    return batch.step_ns / batch.tbt_ns * (1 + batch.change_ns / quantum_ns) + batch.prefill_ns / batch.ttft_ns


def _density(needing: tuple[float, BatchView]) -> float:
    needs, batch = needing
    return batch.worth / (batch.tbt_ns * needs)
