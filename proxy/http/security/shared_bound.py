"""Bytes that many connections hold, bounded together: beyond the bound those that hold most give theirs up."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

_LEFT = 0.75  # of the bound, once some gave up: so all are looked at seldom

H = TypeVar("H", bound=Hashable)


class SharedBound(Generic[H]):
    """The amount of each holder, and of all together. Of holders with the same amount the first gives up first."""

    __slots__ = ("_bytes_max", "_give_up", "_held", "nbytes")

    def __init__(self, bytes_max: int, give_up: Callable[[H], None]) -> None:
        """`give_up` is told a holder that counts no more."""
        self._bytes_max = bytes_max
        self._give_up = give_up
        self._held: dict[H, int] = {}
        self.nbytes = 0

    def hold(self, holder: H, nbytes: int) -> None:
        """The holder has so many now, instead of those before; 0: none any more. Others may give theirs up by that,
        or the holder itself."""
        self.nbytes += nbytes - self._held.get(holder, 0)
        if not nbytes:
            self._held.pop(holder, None)
            return
        self._held[holder] = nbytes
        if self.nbytes > self._bytes_max:
            self._shrink()

    def _shrink(self) -> None:
        for holder in sorted(self._held, key=self._held.__getitem__, reverse=True):
            if self.nbytes <= _LEFT * self._bytes_max:
                return
            self.nbytes -= self._held.pop(holder, 0)
            self._give_up(holder)
