"""The numbers of tokens of a workload's requests."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

from aegis.core.rng import Stream

Lengths = Callable[[Stream], tuple[int, ...]]
"""Draws (input tokens, output tokens), each 1 or more, and of some tasks the reused ones among the input tokens."""

OUTPUT_MIN = 16
"""The public Aegaeon artifact leaves out ShareGPT answers shorter than this."""

_INPUT = (
    (0.0, 1),
    (0.1, 15),
    (0.175, 33),
    (0.25, 114),
    (0.5, 563),
    (0.75, 1123),
    (0.9, 1567),
    (0.97, 1901),
    (0.99, 2174),
    (0.999, 4550),
    (1.0, 12000),
)
_OUTPUT = (
    (0.0, 16),
    (0.025, 16),
    (0.1, 47),
    (0.25, 136),
    (0.5, 269),
    (0.75, 394),
    (0.9, 572),
    (0.95, 753),
    (0.975, 773),
    (0.99, 931),
    (1.0, 1223),
)
_OUTPUT_SCALE = ((0.0, 1.05), (0.25, 0.82), (0.45, 0.98), (0.6, 1.07))
"""The factor on the output from this quantile of the input on."""


def sharegpt(draws: Stream) -> tuple[int, int]:
    """ShareGPT as a multi-turn service sees it: the input is the whole history, the output at least 16 tokens.

    A fit of ours to the lengths that the public Aegaeon artifact draws (mean input 700, mean output 297): quantiles of
    both, straight lines between them, and the output scaled by where the input lies. Inputs of 110 to 480 tokens have
    shorter outputs than others; apart from that the two are nearly independent (rank correlation 0.06, the fit's 0.04).
    """
    at = draws.uniform()
    scale = _OUTPUT_SCALE[bisect_right(_OUTPUT_SCALE, at, key=lambda step: step[0]) - 1][1]
    return round(_quantile(_INPUT, at)), max(OUTPUT_MIN, round(_quantile(_OUTPUT, draws.uniform()) * scale))


def uniform(input_tokens: range, output_tokens: range) -> Lengths:
    """Each length of either range as often, independently; a range of one length fixes it."""
    return lambda draws: (
        input_tokens[draws.below(len(input_tokens))],
        output_tokens[draws.below(len(output_tokens))],
    )


def scaled(lengths: Lengths, ix: float, ox: float) -> Lengths:
    """Inputs ix times and outputs ox times as long: ShareGPT-ix2 and -ox2 are (2, 1) and (1, 2) (Aegaeon, §7.1)."""

    def draw(draws: Stream) -> tuple[int, ...]:
        input_tokens, output_tokens, *reused = lengths(draws)
        longer = [round(tokens * ix) for tokens in reused]
        return max(1, round(input_tokens * ix)), max(1, round(output_tokens * ox)), *longer

    return draw


def _quantile(table: tuple[tuple[float, int], ...], at: float) -> float:
    """The quantile `at`, 0 <= at < 1, on straight lines between the table's points."""
    right = bisect_right(table, at, key=lambda point: point[0])
    (low, low_value), (high, high_value) = table[right - 1], table[right]
    return low_value + (high_value - low_value) * (at - low) / (high - low)
