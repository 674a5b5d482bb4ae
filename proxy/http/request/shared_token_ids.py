"""Token ids as numbers that all prompts share: 8 bytes each in a prompt, where numbers of its own would take 36.

Thousands of prompts may wait in a proxy, of many thousand tokens each.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock

_numbers: list[int] = []
_growing = Lock()


def shared_ids(ids: Sequence[int]) -> tuple[int, ...]:
    """The same ids, which are in a vocabulary: numbers are kept up to the highest one. From any thread."""
    highest = max(ids, default=0)
    if highest >= len(_numbers):
        with _growing:
            _numbers.extend(range(len(_numbers), highest + 1))
    return tuple(map(_numbers.__getitem__, ids))
