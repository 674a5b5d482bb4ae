"""Whose KV on the device a prefill can go on from: choices of one request, and prompts that begin alike."""

from __future__ import annotations

from collections.abc import Iterable

from decode.sequences import Sequence, Where
from memory.common_prefix import alike


def most_alike(sequence: Sequence, others: Iterable[Sequence]) -> tuple[Sequence | None, int]:
    """The one whose KV begins with most of the sequence's tokens, and how many; the last of these has to be run. None
    where nobody's begins with a block more than it has."""
    tokens, best = (*sequence.job.prompt, *sequence.job.sent)[:-1], None
    most = sequence.reused + sequence.block_tokens - 1
    for other in others:
        there = other.cached - other.lacks
        if other is sequence or other.where is not Where.DEVICE or other.spec is not sequence.spec or there <= most:
            continue
        if other.job.prompt[:most] == tokens[: min(most, len(other.job.prompt))]:
            same = alike(tokens, (*other.job.prompt, *other.made)[:there])
            if same > most:
                best, most = other, same
    return best, most
