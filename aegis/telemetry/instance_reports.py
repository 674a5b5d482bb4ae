"""The reports of an instance about its state, and when they are due."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Protocol

from aegis.core.ids import ModelId
from aegis.core.messages import Telemetry
from memory.ledger import Ledger

REPORT_NS = 200_000_000
"""From one report to the next, where work neither came nor ended."""


class Core(Protocol):
    """The core that a report is about."""

    ledger: Ledger
    counters: Any  # a dataclass of integers

    @property
    def active(self) -> ModelId | None: ...

    @property
    def queued(self) -> int: ...

    @property
    def running(self) -> int: ...


class Reporter:
    """A report is due when something was told to the core since the last one: at once where work has come or ended, for
    what an idle instance holds others may have; else when the last one is `REPORT_NS` old."""

    def __init__(self, core: Core, *, lanes: int = 1) -> None:
        self._core = core
        self._lanes = lanes
        self._last: Telemetry | None = None
        self._busy = False
        self._has_new_event = True  # the first report says that there is one
        self._next_ns = 0

    @property
    def due_ns(self) -> int | None:
        """The time at which a report will be due, if nothing more happens."""
        if not self._has_new_event:
            return None
        return self._next_ns if self.busy == self._busy else 0

    @property
    def busy(self) -> bool:
        return self._core.queued + self._core.running > 0

    def note_event(self) -> None:
        """Something was told to the core."""
        self._has_new_event = True

    def due(self, now_ns: int) -> bool:
        due_ns = self.due_ns
        return due_ns is not None and due_ns <= now_ns

    def report(self, now_ns: int, **more: int) -> Telemetry | None:
        """The one that is due, with `more` counters; None if nothing has changed."""
        core, ledger = self._core, self._core.ledger
        self._next_ns, self._busy, self._has_new_event = now_ns + REPORT_NS, self.busy, False
        counters = {f"{name}_total": value for name, value in (asdict(core.counters) | more).items()}
        report = Telemetry(
            core.active,
            ledger.weights.resident(),
            core.queued,
            core.running,
            counters,
            ledger.accounts(),
            loading=tuple(model for model, _ in ledger.weights.loading()),
            shapes=ledger.shapes(),
            lanes=self._lanes,
        )
        if report == self._last:
            return None
        self._last = report
        return report
