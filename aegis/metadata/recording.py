"""The record of one call while it is answered, as this proxy has it: what is known, and how much of it is written.

What was written is kept as it was written, since the server may lose it: with logprobs that takes a tenth of the memory
that the tokens do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from enum import StrEnum

from msgspec import structs

from aegis.core.request import FinishReason, Sampling, Token
from aegis.metadata.batches import Entry, Sequence, encode, joined
from proxy.http.call_records import RecordedCall, Submit
from proxy.http.market import Delivery, Delta, Failed, Finished, PromptScores, SequenceHandle


class CallState(StrEnum):
    """The state of a call as it is recorded. Only a finished call is answered from the record alone."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(slots=True)
class _Unwritten:
    """The part of a sequence that is in no batch yet, from its token number `first` on."""

    first: int = 0
    tokens: list[Token] = field(default_factory=list)
    finish: FinishReason | None = None
    scores: tuple[Token, ...] = ()


@dataclass(slots=True)
class Batch:
    """The next batch to write; so many `parts` are written then."""

    state: CallState
    data: bytes
    parts: int


class Recording:
    """Implements `proxy.http.call_records.CallRecord`."""

    def __init__(
        self, call: RecordedCall, seed: int, known: list[Sequence], changed: Callable[[Recording], None]
    ) -> None:
        """`known` was read from the record. `changed` is called whenever there is more to write."""
        self.call = call
        self.seed = seed
        self.state = CallState.RUNNING
        self.settled = asyncio.Event()  # it has ended, and all of it is written or given up
        self.is_recorded = True  # as far as this proxy knows
        self._known = known  # until there is a handle of it
        self._unfinished = {number for number, sequence in enumerate(known) if sequence.finish is None}
        self._changed = changed
        self._unwritten = [_Unwritten(len(sequence.tokens)) for sequence in known]
        self._new: dict[int, None] = {}  # sequences of which there are
        entries = [_entry(number, sequence) for number, sequence in enumerate(known) if sequence != Sequence()]
        self._parts = [encode(entries)] if entries else []
        self._written = len(self._parts)  # the first of them
        self._failed = False

    def handle(self, sequence: int, sampling: Sampling, submit: Submit) -> SequenceHandle:
        known, self._known[sequence] = self._known[sequence], Sequence()
        if known.finish is None and known.tokens:
            known.finish = sampling.finish(len(known.tokens) - 1, known.tokens[-1].id)
            if known.finish is not None:
                self._finished(sequence, known.finish)
        if known.finish is not None:
            return _RecordedHandle(self, sequence, known, None)
        if known.scores:
            sampling = structs.replace(sampling, prompt_logprobs=None)
        return _RecordedHandle(self, sequence, known, submit(sampling, tuple([token.id for token in known.tokens])))

    def note(self, sequence: int, delivery: Delivery) -> None:
        """Takes the tokens that are delivered now."""
        if self.settled.is_set():
            return
        match delivery:
            case Delta(tokens):
                self._unwritten[sequence].tokens += tokens
            case Finished(reason):
                self._finished(sequence, reason)
            case PromptScores(tokens):
                self._unwritten[sequence].scores = tokens
            case Failed():
                self._failed = True
        self._new[sequence] = None
        self._changed(self)

    def close(self) -> None:
        if self.state is not CallState.RUNNING:
            return
        if not self._unfinished:
            self.state = CallState.FINISHED
        else:
            self.state = CallState.FAILED if self._failed else CallState.CANCELLED
        self._changed(self)

    def batch(self) -> Batch:
        """The entries that have not been written yet."""
        entries: list[Entry] = []
        for sequence in self._new:
            news = self._unwritten[sequence]
            if news.tokens or news.finish or news.scores:
                entries.append(Entry(sequence, news.first, tuple(news.tokens), news.finish, news.scores))
                self._unwritten[sequence] = _Unwritten(news.first + len(news.tokens))
        self._new.clear()
        if entries:
            self._parts.append(encode(entries))
        return Batch(self.state, joined(self._parts[self._written :]), len(self._parts))

    def wrote(self, batch: Batch) -> bool:
        """Whether nothing is left to be written."""
        self._written = batch.parts
        self.is_recorded = True
        return not self._new and batch.parts == len(self._parts) and batch.state is self.state

    def forget_written(self) -> None:
        """The record is gone: all is to be written again."""
        self._written = 0
        self.is_recorded = False

    def settle(self) -> None:
        """Nothing of it is written any more, so nothing is kept for that."""
        self.settled.set()
        self._parts.clear()
        self._unwritten = [_Unwritten() for _ in self._unwritten]

    def _finished(self, sequence: int, reason: FinishReason) -> None:
        self._unwritten[sequence].finish = reason
        self._new[sequence] = None
        self._unfinished.discard(sequence)


def _entry(sequence: int, known: Sequence) -> Entry:
    return Entry(sequence, 0, tuple(known.tokens), known.finish, known.scores)


class _RecordedHandle:
    """A sequence from its first token on, the recorded ones first. Implements `proxy.http.market.SequenceHandle`."""

    def __init__(self, recording: Recording, sequence: int, known: Sequence, handle: SequenceHandle | None) -> None:
        self._recording = recording
        self._sequence = sequence
        self._handle = handle
        self._scores, self._tokens, self._finish = known.scores, tuple(known.tokens), known.finish

    async def __aiter__(self) -> AsyncIterator[Delivery]:
        if self._scores:
            yield PromptScores(self._scores)
        if self._tokens:
            tokens, self._tokens = self._tokens, ()
            yield Delta(tokens)
            del tokens
        if self._handle is None:
            assert self._finish is not None
            yield Finished(self._finish)
            return
        async for delivery in self._handle:
            self._recording.note(self._sequence, delivery)
            yield delivery

    def before(self) -> int | None:
        return self._handle.before() if self._handle else None

    def cancel(self, *, satisfied: bool = False) -> None:
        if self._handle is None:
            return
        self._handle.cancel(satisfied=satisfied)
        if satisfied:
            self._recording.note(self._sequence, Finished(FinishReason.STOP))
