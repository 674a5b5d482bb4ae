"""Runs prefills on an engine, one or a chunk of one at a time, and returns their tokens and their time."""

from __future__ import annotations

from aegis.core.clock import Clock
from aegis.core.effects import RunPrefill
from aegis.core.events import Stepped
from aegis.engine.block_table import block_table
from aegis.engine.protocol import Engine, engine_at_work


class PrefillWorker:
    """The live side of prefills; each is a batch of one (Aegaeon §4.2)."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock

    def step(self, effect: RunPrefill) -> Stepped:
        """Raises EngineFailed."""
        job, blocks = effect.job, block_table(effect.blocks)
        tokens = (*job.prompt, *job.sent)[: effect.stop]
        started_ns = self._clock.now_ns()
        with engine_at_work():
            if effect.start == 0:
                self._engine.start(job.model, job.request, job.prompt, job.sent, job.sampling)
            if not effect.ends:
                ran = self._engine.extend(job.model, tokens, blocks, effect.start)
                return Stepped((), self._clock.now_ns() - started_ns if ran else 0)
            sampled = self._engine.prefill(job.model, job.request, tokens, blocks, effect.start)
        return Stepped(((sampled.token,),), self._clock.now_ns() - started_ns, sampled.prompt)
