"""What a word says by which a load asks a peer for pieces. A word only grows, as all shared words.

Of the 63 bits the highest are the number of the load, then come the number of the piece among those that this peer was
asked for, and the piece. All ones behind the load's number: it wants no more.
"""

from __future__ import annotations

from typing import Final

_PIECE_BITS: Final = 16  # of an image of 512 GiB
_COUNT_BITS: Final = 16  # two thousand million loads are left for the life of a process
_REST: Final = (1 << _PIECE_BITS + _COUNT_BITS) - 1


def request_of(load: int, count: int, piece: int = 0) -> int:
    """Asks for a piece; without one, it is the least value that asks for any as number `count`."""
    assert piece >> _PIECE_BITS == 0 and count >> _COUNT_BITS == 0
    return load << _PIECE_BITS + _COUNT_BITS | count << _PIECE_BITS | piece


def over(load: int) -> int:
    return load << _PIECE_BITS + _COUNT_BITS | _REST


def piece_of(value: int, load: int) -> int | None:
    """None if the load wants no more, be it that its process was lost."""
    return None if value >= over(load) else value & (1 << _PIECE_BITS) - 1
