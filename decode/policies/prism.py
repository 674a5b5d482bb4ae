"""Space sharing where models fit together, time sharing where they do not: Prism."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from aegis.core.clock import NS_PER_MS
from aegis.core.ids import InstanceId
from aegis.core.views import BatchView, DecodeView, Renewal, Turn, TurnRules, Work
from decode.policies.shared_turns import shared_turns

_RULES = TurnRules(renewal=Renewal.ARRIVAL, prefetches=False)
_LOADS = 8
"""A batch whose weights have to come back has the device for so many times what that takes."""


class Prompt(NamedTuple):
    """The next prompt of a batch. Equal deadlines are ordered by number."""

    due_ns: int
    takes_ns: int
    batch: int


@dataclass(frozen=True, slots=True)
class Prism:
    """Several models are resident on a device, with its memory for whoever wants it. Requests go where
    `proxy.policies.kvpr` has placed their model (Algorithm 1), else where it has some or last had, else to the instance
    under least pressure.
    Models move, and the weights of those that were idle for 45 s leave (§6.1).

    Prompts come first, in the order of Moore-Hodgson (§6.2, Algorithm 2): those that can be on time by their deadlines,
    as many as possible; then the others. Then resident models decode in slices. Where weights do not fit together,
    those of idle models leave first, then those that are needed last, and whose weights have to come back has a longer
    turn.

    Prism runs its models side by side, each in an engine of its own with its prompts in chunks, and preempts requests
    that it has no memory for. Here one model steps at a time, prompts run as a whole, and KV without room moves to the
    host. The queue of a device is seen through the next prompt of each batch; a batch's own are in order of arrival.
    """

    arbitrates: bool = True  # otherwise prompts run in order of arrival
    slice_ns: int = 50 * NS_PER_MS
    rules: TurnRules = _RULES

    def place(self, work: Work, lists: DecodeView) -> InstanceId:
        if shares := lists.shares(work.model):
            return shares[0].instance
        return lists.home(work.model) or lists.by_pressure[0].instance

    def plan(self, batches: Sequence[BatchView], now_ns: int) -> list[Turn]:
        if any([batch.waiting for batch in batches]):
            return shared_turns(batches, self.slice_ns, _arbitrated(batches, now_ns) if self.arbitrates else None)
        order = sorted(batches, key=lambda batch: (not batch.resident, batch.decoded_ns, batch.batch))
        alone = len(order) == 1
        return [Turn(batch.batch, None if alone else self._quota_ns(batch)) for batch in order]

    def _quota_ns(self, batch: BatchView) -> int:
        return self.slice_ns if batch.resident else max(self.slice_ns, _LOADS * batch.switch_ns)


def fewest_late(prompts: Iterable[Prompt], now_ns: int) -> list[int]:
    """Moore-Hodgson: batches in the order that makes the fewest prompts late, then those that are late, by deadline.

    By deadline, each is taken in; where it would be late then, the longest one so far is put off.
    """
    kept: set[int] = set()
    longest: list[tuple[int, int]] = []
    ends_ns, order = now_ns, sorted(prompts)
    for prompt in order:
        kept.add(prompt.batch)
        heappush(longest, (-prompt.takes_ns, prompt.batch))
        ends_ns += prompt.takes_ns
        if ends_ns > prompt.due_ns:
            takes_ns, batch = heappop(longest)
            kept.remove(batch)
            ends_ns += takes_ns
    return [p.batch for p in order if p.batch in kept] + [p.batch for p in order if p.batch not in kept]


def _arbitrated(batches: Iterable[BatchView], now_ns: int) -> list[BatchView]:
    by_number = {batch.batch: batch for batch in batches if batch.waiting}
    prompts = [
        Prompt(
            batch.first_due_ns or 0,
            batch.prefill_ns // batch.waiting + (0 if batch.resident else batch.switch_ns),
            batch.batch,
        )
        for batch in by_number.values()
    ]
    return [by_number[number] for number in fewest_late(prompts, now_ns)]
