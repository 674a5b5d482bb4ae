"""The order of copies that share one direction of a link: a rule for the simulator and for devices alike.

(1) `NOW`: KV that the turn waits for, or that makes room for it. It is small beside weights, and without it sequences
that are due are missing in a step. (2) `WEIGHTS` that the turn waits for. (3) `AHEAD`: weights and KV for later turns.
(4) `FOR_PEERS`: what another device's load is helped with.
A copy that had to yield goes on from where it stopped when nothing more urgent is left.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from aegis.core.effects import StreamName

NOW: Final = 0
WEIGHTS: Final = 1
AHEAD: Final = 2
FOR_PEERS: Final = 3

_OF_WEIGHTS: Final = {StreamName.WEIGHTS: WEIGHTS, StreamName.PREFETCH: AHEAD, StreamName.RELAY: FOR_PEERS}


def urgency(stream: StreamName, *, ahead: bool = False) -> int:
    """The urgency of a copy on this stream; `ahead`: of KV that no turn waits for yet."""
    return AHEAD if ahead else _OF_WEIGHTS.get(stream, NOW)


def served(urgencies: Iterable[int]) -> int:
    """The urgency that moves bytes now, of those that want the link, of which there is at least one; equals share
    it."""
    return min(urgencies)
