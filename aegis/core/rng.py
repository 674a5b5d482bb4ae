"""Named random streams derived from one seed by a stable hash: same seed and names, same draws, on any machine.

The generator is SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA'14, Fig. 16).
"""

from __future__ import annotations

from hashlib import blake2b

_MASK = (1 << 64) - 1

STEP = 0x9E3779B97F4A7C15
"""From one state of a stream to the next, modulo 2**64."""

FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
"""The number with which a state is mixed to make a draw of it."""


def derive(seed: int, *names: str | int) -> int:
    """A 64-bit seed for the stream called `names`, independent of the order in which streams are made."""
    text = "\x1f".join((str(seed), *map(str, names)))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


class Stream:
    """One stream of draws."""

    __slots__ = ("_state",)

    def __init__(self, seed: int, *names: str | int) -> None:
        self._state = derive(seed, *names)

    @property
    def state(self) -> int:
        """The state for drawing many numbers at once: the n-th is made of `state + n * STEP`, n from 1."""
        return self._state

    def bits64(self) -> int:
        self._state = (self._state + STEP) & _MASK
        z = self._state
        z = ((z ^ (z >> 30)) * FACTORS[0]) & _MASK
        z = ((z ^ (z >> 27)) * FACTORS[1]) & _MASK
        return z ^ (z >> 31)

    def uniform(self) -> float:
        """A number in [0, 1) of 53 bits."""
        return (self.bits64() >> 11) / (1 << 53)

    def below(self, n: int) -> int:
        """An integer in [0, n)."""
        assert n > 0
        return self.bits64() * n >> 64
