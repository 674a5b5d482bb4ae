"""The duration of an engine's steps (Aegaeon Appendix A.2, eq. 5 and 6).

Coefficients are whole picoseconds, so that a run of many steps has one exact duration on any machine, and the number of
steps that fit into a time is its exact inverse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isqrt, sqrt
from typing import Final

from aegis.core.step_terms import decode_terms, prefill_terms
from aegis.core.views import PPM

_PS_PER_NS: Final = 1_000
_PS_PER_MS: Final = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Durations of one model's steps on one device. Picoseconds add up exactly; only a total is rounded up to ns.

    A decode step over a batch takes `decode_ps + context_token_ps * context tokens + row_ps * rows`, and `batch_ps`
    more where there is more than one row: a matrix takes other kernels than a vector. A prefill takes
    `prefill_ps + token_ps * t + token2_ps * t²`, and never less than a decode step over as many tokens: both have to
    read all the weights. So does each chunk of one, of which the squares share out those of the whole. Rows of one step
    share what they read.
    """

    decode_ps: int
    context_token_ps: int = 0
    row_ps: int = 0
    batch_ps: int = 0
    prefill_ps: int = 0
    token_ps: int = 0
    token2_ps: int = 0

    def __post_init__(self) -> None:
        assert self.decode_ps > 0, "a step that takes no time would never end a turn"
        others = (self.context_token_ps, self.row_ps, self.batch_ps, self.prefill_ps, self.token_ps, self.token2_ps)
        assert min(others) >= 0

    @classmethod
    def of_ms(
        cls,
        *,
        decode: tuple[float, float, float],
        prefill: tuple[float, float, float] = (0.0, 0.0, 0.0),
        batch: float = 0.0,
    ) -> StepCosts:
        """From milliseconds: `decode` per step, per 1 000 context tokens and per row; `batch` per step of more than one
        row; `prefill` per prompt, per 1 000 tokens and per 1 000 000 squared tokens. Each is rounded to the nearest
        picosecond per unit."""
        step, context_ktoken, row = decode
        prompt, ktoken, mtoken2 = prefill
        return cls(
            decode_ps=round(step * _PS_PER_MS),
            context_token_ps=round(context_ktoken * _PS_PER_MS / 1e3),
            row_ps=round(row * _PS_PER_MS),
            batch_ps=round(batch * _PS_PER_MS),
            prefill_ps=round(prompt * _PS_PER_MS),
            token_ps=round(ktoken * _PS_PER_MS / 1e3),
            token2_ps=round(mtoken2 * _PS_PER_MS / 1e6),
        )

    def prefill_ns(self, stop: int, start: int = 0) -> int:
        """Eq. 5 for positions `[start, stop)` of a batch of one prompt, the KV of those before being there."""
        tokens, squares = prefill_terms(stop, start)
        ps = self.prefill_ps + self.token_ps * tokens + self.token2_ps * squares
        return max(_whole_ns(ps), self.decode_ns(stop, 1))

    def step_ns(self, pieces: Sequence[tuple[int, int]], context_tokens: int = 0, batch: int = 0) -> int:
        """One step of prompts, of each positions `[start, stop)`, and beside them `batch` rows that decode over
        `context_tokens` cached tokens in all. What a step takes whatever its rows are is counted once, so one prompt
        alone takes `prefill_ns`."""
        ps, least_ps = self._parts_ps(pieces)
        _, read, computed = decode_terms(context_tokens, batch)
        beside_ps = self.context_token_ps * read + self.row_ps * computed
        return _whole_ns(max(ps, least_ps) + beside_ps)

    def parts_ns(self, pieces: Sequence[tuple[int, int]]) -> tuple[int, int]:
        """The time in which they are computed, and that in which what they need is read: a step takes the longer
        one."""
        ps, least_ps = self._parts_ps(pieces)
        return _whole_ns(ps), _whole_ns(least_ps)

    def _parts_ps(self, pieces: Sequence[tuple[int, int]]) -> tuple[int, int]:
        tokens, squares, reached = 0, 0, 0
        for start, stop in pieces:
            own, own_squares = prefill_terms(stop, start)
            tokens, squares, reached = tokens + own, squares + own_squares, reached + stop
        return self.prefill_ps + self.token_ps * tokens + self.token2_ps * squares, self._run_ps(reached, 1)

    def going_on(self) -> StepCosts:
        """Of further layers of a prompt that has begun: nothing is read twice, and what a prefill takes whatever its
        length is was counted with the first ones."""
        return replace(self, decode_ps=1, context_token_ps=0, prefill_ps=0)

    def scaled(self, ppm: int) -> StepCosts:
        """What takes so many millionths of the time."""
        return replace(
            self,
            decode_ps=max(self.decode_ps * ppm // PPM, 1),
            context_token_ps=self.context_token_ps * ppm // PPM,
            row_ps=self.row_ps * ppm // PPM,
            batch_ps=self.batch_ps * ppm // PPM,
            prefill_ps=self.prefill_ps * ppm // PPM,
            token_ps=self.token_ps * ppm // PPM,
            token2_ps=self.token2_ps * ppm // PPM,
        )

    def decode_ns(self, context_tokens: int, batch: int) -> int:
        """Eq. 6 and a term per row: one step of `batch` rows over `context_tokens` cached tokens in all."""
        return _whole_ns(self._run_ps(context_tokens, batch))

    def run_ns(self, context_tokens: int, batch: int, steps: int) -> int:
        """`steps` steps in a row, the first as in `decode_ns`; each leaves every row one token longer.

        Exact but for one rounding, up to the next nanosecond: less than the sum of single steps by under 1 ns a step.
        Step k of a run ends at `start + run_ns(.., k)`.
        """
        return _whole_ns(self._run_ps(context_tokens, batch, steps))

    def steps_within(self, context_tokens: int, batch: int, budget_ns: int) -> int:
        """The most steps n with `run_ns(.., n) <= budget_ns`."""
        if budget_ns <= 0:
            return 0
        first_ps, growth_ps, budget_ps = (
            self._run_ps(context_tokens, batch),
            self.context_token_ps * batch,
            budget_ns * _PS_PER_NS,
        )
        # The larger root of growth·n² + (2·first - growth)·n - 2·budget, in a form that also holds where nothing grows.
        # Floats are right but for a few steps, at the very most.
        linear, twice = float(2 * first_ps - growth_ps), 2.0 * budget_ps
        steps = int(2 * twice / (sqrt(linear * linear + 4 * growth_ps * twice) + linear))
        while self._run_ps(context_tokens, batch, steps) > budget_ps:
            steps -= 1
        while self._run_ps(context_tokens, batch, steps + 1) <= budget_ps:
            steps += 1
        return steps

    def steps_in_time(self, context_tokens: int, batch: int, steps: int, *, budget_ns: int, each_ns: int) -> int:
        """The number n of `1 … steps` that have `run_ns(.., n) <= budget_ns + n * each_ns`."""
        each_ps = each_ns * _PS_PER_NS
        first_ps = self._run_ps(context_tokens, batch) - each_ps
        growth_ps, budget_ps = self.context_token_ps * batch, budget_ns * _PS_PER_NS
        low, high = 1, steps
        if first_ps <= budget_ps and self._run_ps(context_tokens, batch, steps) - each_ps * steps <= budget_ps:
            return steps  # on time at both ends means on time between them, because time grows ever faster
        if growth_ps:
            # Between the roots of the polynomial of `steps_within`. For a whole n the integer root decides as the real
            # one would: n·2·growth + linear is whole, so it is at most √d just when it is at most ⌊√d⌋.
            linear = 2 * first_ps - growth_ps
            square = linear * linear + 8 * growth_ps * budget_ps
            if square < 0:
                return 0
            root = isqrt(square)
            low, high = -((root + linear) // (2 * growth_ps)), (root - linear) // (2 * growth_ps)
        elif first_ps > 0:
            high = budget_ps // first_ps
        elif first_ps < 0:
            low = -(budget_ps // -first_ps)
        elif budget_ps < 0:
            return 0
        low, high = max(low, 1), min(high, steps)
        return high - low + 1 if low <= high else 0

    def _run_ps(self, context_tokens: int, batch: int, steps: int = 1) -> int:
        steps, read, computed = decode_terms(context_tokens, batch, steps)
        ps = self.decode_ps * steps + self.context_token_ps * read + self.row_ps * computed
        return ps + self.batch_ps * steps if batch > 1 else ps


def _whole_ns(ps: int) -> int:
    return -(-ps // _PS_PER_NS)


def copy_ns(nbytes: int, bytes_per_s: int) -> int:
    """A copy that has a link to itself, rounded up."""
    return -(-nbytes * 1_000_000_000 // bytes_per_s)
