"""An asyncio loop in virtual time: where it would wait, its actor does."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from typing import Any

from aegis.core.clock import NS_PER_S
from tests.parity.conductor import Actor, Conductor


class _Selector(selectors.DefaultSelector):
    """In real time until it is told how to wait."""

    actor: Actor | None = None
    conductor: Conductor

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self.actor is None or (timeout is not None and timeout <= 0):
            return super().select(timeout)
        ready = super().select(0)
        if not ready:
            until_ns = None if timeout is None else self.conductor.now_ns() + round(timeout * NS_PER_S)
            self.actor.wait(until_ns, listening=True)
            ready = super().select(0)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """`begin` ends real time, in which anything may be prepared. Then nothing outside of the loop may be waited for."""

    def __init__(self, conductor: Conductor) -> None:
        self._waiting = _Selector()
        super().__init__(self._waiting)
        self._waiting.conductor = conductor
        self._conductor = conductor

    def time(self) -> float:
        return self._conductor.now_ns() / NS_PER_S

    def begin(self, actor: Actor) -> None:
        self._waiting.actor = actor

    def end(self) -> None:
        """Real time again."""
        self._waiting.actor = None

    def happen(self, action: Callable[..., None], *arguments: Any) -> None:
        """From outside: now, on the loop."""
        self.call_soon_threadsafe(action, *arguments)
        assert self._waiting.actor is not None
        self._waiting.actor.nudge()
