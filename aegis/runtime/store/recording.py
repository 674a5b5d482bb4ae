"""The record of one call while it is answered, as this proxy has it: what is known, and how much of it is written."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from enum import StrEnum

from msgspec import structs

from aegis.core.request import FinishReason, Sampling
from aegis.runtime.store.batches import Entry, Sequence, encode
from proxy.http.boundary import Delivery, Delta, Failed, Finished, PromptScores, Ticket
from proxy.http.records import Asked, Submit


class CallState(StrEnum):
    """As recorded. Only what is finished is answered from the record alone."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(slots=True)
class Written:
    """How much of a sequence has been written."""

    tokens: int = 0
    finish: bool = False
    scores: bool = False


@dataclass(slots=True)
class Batch:
    """What is to be written next; `marks` is how much is written then."""

    state: CallState
    data: bytes
    marks: list[tuple[int, Written]] = field(default_factory=list)


class Recording:
    """Implements `proxy.http.records.CallRecord`."""

    def __init__(self, asked: Asked, seed: int, known: list[Sequence], changed: Callable[[Recording], None]) -> None:
        """`known` was read from the record. `changed` is called whenever there is more to write."""
        self.asked = asked
        self.seed = seed
        self.state = CallState.RUNNING
        self.settled = asyncio.Event()  # it has ended, and all of it is written or given up
        self.claim: asyncio.Task[None] | None = None  # on its way, or refused
        self._known = known
        self._written = [_all(sequence) for sequence in known]
        self._changed = changed
        self._news: dict[int, None] = {}  # sequences of which something is to be written
        self._failed = False

    def ticket(self, sequence: int, sampling: Sampling, submit: Submit) -> Ticket:
        known = self._known[sequence]
        if known.finish is None and known.tokens:
            known.finish = sampling.finish(len(known.tokens) - 1, known.tokens[-1].id)
            self._news[sequence] = None
        if known.finish is not None:
            return _RecordedTicket(self, sequence, known, None)
        if known.scores:
            sampling = structs.replace(sampling, prompt_logprobs=None)
        return _RecordedTicket(self, sequence, known, submit(sampling, tuple([token.id for token in known.tokens])))

    async def opened(self) -> None:
        if self.claim:
            await asyncio.shield(self.claim)

    def note(self, sequence: int, delivery: Delivery) -> None:
        """What is delivered now."""
        known = self._known[sequence]
        match delivery:
            case Delta(tokens):
                known.tokens += tokens
            case Finished(reason):
                known.finish = reason
            case PromptScores(tokens):
                known.scores = tokens
            case Failed():
                self._failed = True
        self._news[sequence] = None
        self._changed(self)

    def close(self) -> None:
        if self.state is not CallState.RUNNING:
            return
        if all(known.finish is not None for known in self._known):
            self.state = CallState.FINISHED
        else:
            self.state = CallState.FAILED if self._failed else CallState.CANCELLED
        self._changed(self)

    def batch(self) -> Batch:
        """What has not been written yet."""
        entries: list[Entry] = []
        marks: list[tuple[int, Written]] = []
        for sequence in self._news:
            known, written = self._known[sequence], self._written[sequence]
            tokens = tuple(known.tokens[written.tokens :])
            finish = None if written.finish else known.finish
            scores = () if written.scores else known.scores
            if tokens or finish or scores:
                entries.append(Entry(sequence, written.tokens, tokens, finish, scores))
                marks.append((sequence, _all(known)))
        return Batch(self.state, encode(entries) if entries else b"", marks)

    def wrote(self, batch: Batch) -> bool:
        """Whether nothing is left to be written."""
        for sequence, written in batch.marks:
            self._written[sequence] = written
        for sequence in [s for s in self._news if self._written[s] == _all(self._known[s])]:
            del self._news[sequence]
        return not self._news and batch.state is self.state

    def forget_written(self) -> None:
        """The record is gone: all is to be written again."""
        self._written = [Written() for _ in self._known]
        self._news = dict.fromkeys(range(len(self._known)))


def _all(known: Sequence) -> Written:
    return Written(len(known.tokens), known.finish is not None, bool(known.scores))


class _RecordedTicket:
    """A sequence from its first token on, the recorded ones first. Implements `proxy.http.boundary.Ticket`."""

    def __init__(self, recording: Recording, sequence: int, known: Sequence, ticket: Ticket | None) -> None:
        self._recording = recording
        self._sequence = sequence
        self._ticket = ticket
        self._scores, self._tokens, self._finish = known.scores, tuple(known.tokens), known.finish

    async def __aiter__(self) -> AsyncIterator[Delivery]:
        if self._scores:
            yield PromptScores(self._scores)
        if self._tokens:
            yield Delta(self._tokens)
        if self._ticket is None:
            assert self._finish is not None
            yield Finished(self._finish)
            return
        async for delivery in self._ticket:
            self._recording.note(self._sequence, delivery)
            yield delivery

    def before(self) -> int | None:
        return self._ticket.before() if self._ticket else None

    def cancel(self, *, satisfied: bool = False) -> None:
        if self._ticket is None:
            return
        self._ticket.cancel(satisfied=satisfied)
        if satisfied:
            self._recording.note(self._sequence, Finished(FinishReason.STOP))
