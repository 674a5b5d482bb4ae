"""How far two sequences of tokens are the same."""

from __future__ import annotations


def alike(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many tokens both begin with, by halving: slices are compared faster than tokens."""
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
