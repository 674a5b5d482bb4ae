"""Finds the first stop string to be complete in a text that arrives in pieces, wherever the pieces are cut.

One automaton per stop string, after Knuth, Morris and Pratt (Fast Pattern Matching in Strings, 1977): its state is the
length of the longest prefix of the stop string that ends the text so far. A character costs O(1) amortised, and the
greatest state is exactly how much text may yet turn out to belong to a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct


class Match(Struct, frozen=True):
    """`stop` is complete at `end`, counted in the text fed last; its first character may lie before that."""

    end: int
    stop: str

    @property
    def length(self) -> int:
        return len(self.stop)


class StopScanner:
    """Of stop strings complete at the same character the longest counts, so the least text is kept."""

    __slots__ = ("_failures", "_states", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        assert stops and all(stops), "no stop strings, or an empty one"
        self._stops = stops
        self._failures = [_failures(stop) for stop in stops]
        self._states = [0] * len(stops)

    @property
    def held(self) -> int:
        """The number of characters at the end of the text that begin a stop string."""
        return max(self._states)

    def feed(self, text: str) -> Match | None:
        """Goes on with `text`. After a match nothing may be fed any more."""
        for index, character in enumerate(text):
            complete = ""
            for which, stop in enumerate(self._stops):
                state = self._states[which]
                while state and stop[state] != character:
                    state = self._failures[which][state - 1]
                state += stop[state] == character
                self._states[which] = state
                if state == len(stop) > len(complete):
                    complete = stop
            if complete:
                return Match(index + 1, complete)
        return None


def _failures(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of its longest proper prefix that is also its suffix."""
    failures = [0] * len(stop)
    state = 0
    for index in range(1, len(stop)):
        while state and stop[index] != stop[state]:
            state = failures[state - 1]
        state += stop[index] == stop[state]
        failures[index] = state
    return failures
