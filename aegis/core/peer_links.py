"""Loads that go over the links of several devices (Prism §5.3): how an image is cut, and how much of it a peer holds.

A peer copies a piece from the host to staging pages of its own device, and from there the piece goes over the peer link
to the device that loads. The load's own link copies from the image's beginning, its peers what lies at the end, piece
by piece as each has a free place, until they meet. A peer is asked for one piece after the other, so one that is slow,
busy or lost takes nothing along.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

PIECE_BYTES: Final = 8 << 20

PLACES: Final = 3
"""Pieces that a peer has room for: one arrives while another one goes on, and the next was asked for."""

STAGING_BYTES: Final = PLACES * PIECE_BYTES
"""24 MiB; Prism's buffer has 30 MB."""

PEERS_MAX: Final = 7
"""Of one load: a node of eight devices has no more."""

LEAST_PIECES: Final = 8
"""Smaller images arrive before a peer could help."""


class PeerWords(Struct, frozen=True):
    """Shared words of an instance: for each peer that carries for it one for each place, which says what piece belongs
    there, and the one whose progress says how many pieces it has staged for another one."""

    requests: tuple[tuple[int, ...], ...]
    staged: int
