"""Groups of requests that span batch sizes and contexts, so that what steps cost shows within a minute or two."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from aegis.core.rng import Stream
from bench.workloads.arrival import Arrival, model_name

_SHORTER = (64, 4, 1)  # prompts are the longest divided by these


@dataclass(frozen=True, slots=True)
class Grid:
    """Groups of 1, 2, 4, … requests of one model at once, each size with short, middling and long prompts."""

    models: int = 8
    rows: int = 16
    prompt: int = 1024
    answer: int = 64
    every_s: float = 0.6

    @property
    def requests(self) -> int:
        return self.models * sum(self._sizes()) * len(_SHORTER)

    def arrivals(self, draws: Stream) -> Iterator[Arrival]:
        """Group by group, every model with every size and every length of prompts once, in an order that is drawn.

        Drawn, for in a regular one the speed of a machine that changes with time would look like a cost of some size,
        and what is held out of a fit could be always the same size. Answers are half as long as `answer` at least, so
        the rows of a group end one by one.
        """
        groups = list(product(range(self.models), self._sizes(), _SHORTER))
        groups.sort(key=lambda _: draws.bits64())
        shortest = -(-self.answer // 2)
        for index, (model, rows, shorter) in enumerate(groups):
            at_ns, prompt = round(index * self.every_s * 1e9), max(1, self.prompt // shorter)
            for _ in range(rows):
                answer = shortest + draws.below(self.answer - shortest + 1)
                yield Arrival(at_ns, model_name(model), prompt, answer)

    def _sizes(self) -> list[int]:
        """Powers of two, up to `rows`."""
        return [1 << power for power in range(self.rows.bit_length())]
