"""Events of an instance's transfers, counted per stream.

A stream completes its copies in order, so an event is a number: copy n of a stream has passed once the stream's
progress is at least n. That makes the event of a copy known before it is submitted, the same in every process, and in
the simulator.

The three rules of Aegaeon §5.3, and where they are code:
(1) compute waits for its own request's KV only: a sequence joins a step once its arrival has passed (`KvSwap.settle`);
(2) a transfer waits for the last transfer of its source blocks: `CopyBlocks.after`;
(3) blocks that an earlier transfer still touches are on a move list: `SlabPool.free_after`.
"""

from __future__ import annotations

from collections.abc import Mapping

from aegis.core.effects import StreamName
from aegis.core.request import EventHandle


class Transfers:
    """Submission and completion counts of the streams of one instance."""

    __slots__ = ("_by_word", "_completed", "_submitted", "_words")

    def __init__(self, words: Mapping[StreamName, int]) -> None:
        self._words = dict(words)
        self._by_word = {word: name for name, word in words.items()}
        self._submitted = dict.fromkeys(words, 0)
        self._completed = dict.fromkeys(words, 0)

    def word(self, stream: StreamName) -> int:
        """The shared word of the stream."""
        return self._words[stream]

    def next(self, stream: StreamName) -> EventHandle:
        """The event of the copy that is submitted next."""
        self._submitted[stream] += 1
        return EventHandle(self._words[stream], self._submitted[stream])

    def progress(self, stream: StreamName, value: int) -> None:
        assert self._completed[stream] <= value <= self._submitted[stream]
        self._completed[stream] = value

    def passed(self, event: EventHandle) -> bool:
        """Whether one of this instance's own events has passed."""
        return self._completed[self._by_word[event.word]] >= event.value

    @property
    def in_flight(self) -> int:
        return sum(self._submitted.values()) - sum(self._completed.values())

    def by_stream(self) -> dict[StreamName, int]:
        """The number of transfers that have not ended, by stream."""
        return {name: submitted - self._completed[name] for name, submitted in self._submitted.items()}
