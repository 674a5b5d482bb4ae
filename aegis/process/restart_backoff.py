"""The delay before a process that ended is started again, and the point at which it is given up."""

from __future__ import annotations

from dataclasses import dataclass

_RETRIES = 5  # starts in a row that never served, where none ever did: something is wrong with what is started
_RETRIES_LATER = 9  # where one has: what the machine lacks may be there again in two minutes
_BACKOFF_S = 0.5
_STEADY_S = 10.0  # a process that ends sooner is started again after a pause, if it is not the first


@dataclass(slots=True)
class RestartBackoff:
    """The restarts of one place in a pool of processes."""

    has_served: bool = False
    failures: int = 0  # starts in a row that did not get to serve
    quick_ends: int = 0  # ends in a row that came soon after the start

    def failed(self) -> None:
        """The process could not be started."""
        self.failures += 1

    def ended(self, *, served: bool, after_s: float) -> None:
        self.has_served = self.has_served or served
        self.failures = 0 if served else self.failures + 1
        self.quick_ends = self.quick_ends + 1 if after_s < _STEADY_S else 0

    @property
    def given_up(self) -> bool:
        return self.failures >= (_RETRIES_LATER if self.has_served else _RETRIES)

    @property
    def pause_s(self) -> float:
        """Before the next start."""
        failures = (1 << min(self.failures, 6)) - 1 if self.has_served else self.failures
        return _BACKOFF_S * ((1 << min(self.quick_ends, 4)) - 1 + failures)
