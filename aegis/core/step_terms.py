"""What the time of a prefill and of decode steps is linear in (Aegaeon Appendix A.2, eq. 5 and 6), in whole numbers.

The estimators that serve, the costs that simulate and the fits that calibrate all use these terms, each with its own
coefficients.
"""

from __future__ import annotations


def prefill_terms(stop: int, start: int = 0) -> tuple[int, int]:
    """Eq. 5 for positions `[start, stop)` of a prompt, the KV of those before being there: tokens, and squared tokens.
    Those of a prompt's chunks add up to those of the prompt."""
    return stop - start, stop * stop - start * start


def decode_terms(context_tokens: int, rows: int, steps: int = 1) -> tuple[int, int, int]:
    """Eq. 6 and a term per row for `steps` steps in a row, the first over `context_tokens` cached tokens in all, each
    of which leaves every row one token longer: steps, cached tokens that they read, and rows that they compute."""
    return steps, context_tokens * steps + rows * (steps * (steps - 1) // 2), rows * steps
