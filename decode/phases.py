"""Which sequences run, and the messages by which proxies learn that this has changed."""

from __future__ import annotations

from collections.abc import Iterable

from aegis.core.effects import Row, Track
from aegis.core.messages import Phase, Started
from decode.counters import Counters
from decode.sequences import Sequence
from memory.effect_list import EffectList


class Phases:
    """A sequence runs from a step of its own until its batch is preempted. Those that run are counted as they come and
    go: under overload thousands wait, and each event asks."""

    def __init__(self, counters: Counters, effects: EffectList) -> None:
        self.running = 0
        self._counters = counters
        self._effects = effects

    def begin(self, sequences: tuple[Sequence, ...], prompts: tuple[Row, ...]) -> None:
        """A run of them begins, in which the first ones have rows of prompts."""
        for sequence, row in zip(sequences, prompts, strict=False):
            if row.start == sequence.reused and not sequence.suspect:
                self._start(sequence)
        self.run(sequences[len(prompts) :])

    def run(self, sequences: Iterable[Sequence]) -> None:
        self._set([s for s in sequences if not s.running], running=True)

    def stop(self, sequences: Iterable[Sequence]) -> None:
        stopped = [s for s in sequences if s.running]
        self._counters.preemptions += len(stopped)
        self._set(stopped, running=False)

    def leave(self, sequence: Sequence) -> None:
        """The sequence is about to be dropped: it does not count as running any more."""
        self.running -= sequence.running

    # ------------------------------------------------------------------------------------------------------------------

    def _start(self, sequence: Sequence) -> None:
        """The first run of its prefill. If it starts after reused KV, the engine has to be told (`Track`): a prefill
        starts a sequence by itself only at position 0."""
        job = sequence.job
        if sequence.reused:
            self._effects.append(Track(job, job.sent))
        self._effects.send(Started(job.request, job.attempt))

    def _set(self, changed: list[Sequence], *, running: bool) -> None:
        for sequence in changed:
            sequence.running = running
        there = sum([not sequence.dropped for sequence in changed])
        self.running += there if running else -there
        if changed:
            self._effects.send(Phase(tuple([s.job.request for s in changed]), running=running))
