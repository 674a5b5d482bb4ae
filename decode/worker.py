"""Runs decode steps on an engine and says what came out and how long it took."""

from __future__ import annotations

from aegis.core.clock import Clock
from aegis.core.effects import RunDecode
from aegis.core.events import Stepped
from aegis.engine.base import Engine, Row


class DecodeWorker:
    """The live side of a `DecodeCore`'s steps."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock

    def step(self, effect: RunDecode) -> Stepped:
        started_ns = self._clock.now_ns()
        rows = [Row(row.request, row.token, row.position, row.blocks) for row in effect.rows]
        sampled = self._engine.decode(effect.model, rows)
        return Stepped(tuple(s.token for s in sampled), self._clock.now_ns() - started_ns)
