"""The length of the common beginning of two sequences of tokens."""

from __future__ import annotations


def common_tokens(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """The number of tokens that both begin with, found by halving, because slices are compared faster than tokens."""
    same, differs = 0, min(len(one), len(other))
    if one[:differs] == other[:differs]:
        return differs
    while differs - same > 1:
        middle = (same + differs) // 2
        if one[same:middle] == other[same:middle]:
            same = middle
        else:
            differs = middle
    return same
