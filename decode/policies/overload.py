"""The batches that are kept on time where not all can be: those that make the most tokens on time per second."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from aegis.core.views import LATE_WEIGHT, BatchView
from decode.slack import begin_by_ns

_CATCH_UP: Final = 4  # TTFTs


@dataclass(frozen=True, slots=True)
class Shedding:
    """When each batch, by number, counts as having to begin, and which batches are `shed`: not kept on time. If there
    are any, `latest_ns` is when the first batch has been put off for as long as may be."""

    by_ns: dict[int, int]
    shed: frozenset[int]
    latest_ns: int = 0


def shedding(batches: Sequence[BatchView], quantum_ns: int, shed_share: float, now_ns: int) -> Shedding:
    """To be on time, a batch needs a step in every TBT, its prefills in every TTFT, and in every quantum the change to
    it and what turns were lately seen to wait for. If it is late, it also needs, within `_CATCH_UP` TTFTs, the steps by
    which it is, since it makes nothing on time before it has caught up. If steps alone take more than all of the time,
    `1 - shed_share` of it is given to batches in the order of their tokens on time per second of it, the densest in any
    case, and the others are shed. If they do not, more prefills than there is time for are a burst that passes.

    All of the time is what the instance has been seen to have (`_seen_share`).

    A batch that is kept counts by its first token that can still be on time; where there is none, by its last turn. One
    that is shed counts by its last turn, or by its deadline if it had none, and so many quanta later that turns of all
    shed batches in a row take `shed_share` of the time: no batch waits longer than that for lack of worth. Before that,
    the time that kept batches can spare, beside a quantum for each of them, goes to shed ones that can still be on
    time, the densest first, rather than to those that have waited longest and are the latest: by deadlines all of them
    would begin just in time, and none stay so. But none of them comes before a batch that may not be put off until the
    other has to begin.
    """
    densest = [(_needs(batch, quantum_ns), batch) for batch in batches]
    densest.sort(key=_density, reverse=True)
    seen, shed = _seen_share(batches, densest, 1 - shed_share), frozenset[int]()
    if spoken_for(batches) > seen:
        kept = _kept(densest, (1 - shed_share) * seen)
        shed = frozenset([batch.batch for batch in batches if batch.batch not in kept])
    put_off_ns = shed_for_ns(len(shed), quantum_ns, shed_share)
    by_ns = {batch.batch: _by_ns(batch, put_off_ns, kept=batch.batch not in shed) for batch in batches}
    if not shed:
        return Shedding(by_ns, shed)
    spare_ns = now_ns + (len(batches) - len(shed)) * quantum_ns
    latest_ns = sorted([_latest_ns(batch, put_off_ns) for batch in batches])
    for rank, (_, batch) in enumerate(densest):
        if batch.batch in shed and batch.in_time_by_ns is not None:
            owed = bisect_left(latest_ns, begin_by_ns(batch))
            after_ns = max(spare_ns, latest_ns[owed - 1]) if owed else spare_ns
            by_ns[batch.batch] = min(by_ns[batch.batch], after_ns + rank)
    return Shedding(by_ns, shed, latest_ns[0])


def _seen_share(batches: Sequence[BatchView], densest: Sequence[tuple[float, BatchView]], room: float) -> float:
    """The part of its time in which the instance does what needs count. Steps of those that would be kept are a part of
    what they need. If steps of whole batches have had less of the time than that, the rest went into what no estimate
    knows, such as prompts that come one after the other, or rows whose KV was not there. That counts for no more than
    `LATE_WEIGHT` times the part of the requests that is late already: what is on time all the same is no loss. Where
    two batches run at a time there is more than all of the time: as much as steps were seen to have."""
    kept = _kept(densest, room)
    steps = spoken_for([batch for batch in batches if batch.batch in kept])
    needs = sum([needs for needs, batch in densest if batch.batch in kept])
    on_time, requests = sum([batch.on_time for batch in batches]), sum([len(batch.requests) for batch in batches])
    late = 1 - on_time / requests if requests else 0.0
    share = batches[0].steps_share
    return min(max(share, 1.0), max(share * needs / steps if steps else 1.0, 1 - LATE_WEIGHT * late))


def _kept(densest: Sequence[tuple[float, BatchView]], room: float) -> set[int]:
    """The densest, up to the first that does not fit beside those before it. A less dense one that would fit is not
    kept in its place: what is left over is spare time, and the denser ones that are shed are first in it. One that does
    not fit even alone is passed over, unless it is the first."""
    kept, left = set[int](), room
    for needs, batch in densest:
        if needs <= left or not kept:
            kept.add(batch.batch)
            left -= needs
        elif needs <= room:
            break
    return kept


def _by_ns(batch: BatchView, put_off_ns: int, *, kept: bool) -> int:
    if not kept:
        return _latest_ns(batch, put_off_ns)
    in_time_ns = batch.in_time_by_ns
    return _latest_ns(batch, 0) if in_time_ns is None else min(in_time_ns, _latest_ns(batch, put_off_ns))


def _latest_ns(batch: BatchView, put_off_ns: int) -> int:
    """Until when it may be put off."""
    deadline_ns = begin_by_ns(batch)
    had_ns = batch.ran_ns if batch.ran_ns >= 0 else deadline_ns
    return max(had_ns + put_off_ns, deadline_ns)


def spoken_for(batches: Sequence[BatchView]) -> float:
    """The share of the time that a step of each batch every TBT takes."""
    return sum([batch.step_ns / batch.tbt_ns for batch in batches])


def shed_for_ns(shed: int, quantum_ns: int, shed_share: float) -> int:
    """The longest time between two turns of one of so many batches that are shed."""
    return round(shed * quantum_ns / shed_share)


def _needs(batch: BatchView, quantum_ns: int) -> float:
    """The share of the time with which the batch is on time."""
    lost_ns = batch.change_ns + (batch.stall_ns or 0)
    steps = batch.step_ns / batch.tbt_ns * (1 + lost_ns / quantum_ns)
    return steps * (1 + batch.late_ns / (_CATCH_UP * batch.ttft_ns)) + batch.prefill_ns / batch.ttft_ns


def _density(needing: tuple[float, BatchView]) -> float:
    needs, batch = needing
    return batch.worth / (batch.tbt_ns * needs)
