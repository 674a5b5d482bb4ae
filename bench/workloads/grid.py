"""Groups of requests that span batch sizes and contexts, so that what steps cost shows within minutes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from aegis.core.rng import Stream
from aegis.core.views import MAX_BATCH
from bench.workloads.arrival import Arrival, model_name

_SHORTER = (64, 4, 1)  # prompts are the longest divided by these
_TOGETHER = 1 << 14  # prompt tokens of a group: with more of them, prefills would be most of what is done


@dataclass(frozen=True, slots=True)
class Grid:
    """Groups of 1, 2, 4, … requests of one model at once, each size with short, middling and long prompts."""

    models: int = 8
    rows: int = MAX_BATCH
    prompt: int = 1920
    answer: int = 64
    repeats: int = 3
    every_s: float = 0.4

    @property
    def requests(self) -> int:
        return self.models * self.repeats * sum(rows for rows, _ in self._cells())

    def arrivals(self, draws: Stream) -> Iterator[Arrival]:
        """Group by group, every model with every size and length of prompts `repeats` times, in an order that is drawn.

        Drawn, for in a regular one the speed of a machine that changes with time would look like a cost of some size,
        and what is held out of a fit could be always the same size. Repeated, for what alike groups differ by is what
        no cost explains. Answers are all as long as each other: where rows end one by one, runs have few steps.
        """
        groups = [group for group in product(range(self.models), self._cells()) for _ in range(self.repeats)]
        groups.sort(key=lambda _: draws.bits64())
        for index, (model, (rows, prompt)) in enumerate(groups):
            for _ in range(rows):
                yield Arrival(round(index * self.every_s * 1e9), model_name(model), prompt, self.answer)

    def _cells(self) -> list[tuple[int, int]]:
        """The sizes of groups and their tokens: powers of two, up to `rows`."""
        prompts = [max(1, self.prompt // shorter) for shorter in _SHORTER]
        sizes = [1 << power for power in range(self.rows.bit_length())]
        return [cell for cell in product(sizes, prompts) if cell[0] == 1 or cell[0] * cell[1] <= _TOGETHER]
