"""What an instance learns of how long a change of models takes besides its copies."""

from __future__ import annotations

from typing import Final

_NEWEST_SHARE: Final = 1 / 8
_LEAST_NS: Final = 5_000_000  # less makes no difference to turns, and may be noise


class ChangeTimes:
    """Of one instance: the time that passed before a run although nothing had to be waited for, which its steps do not
    account for, beside that of runs without a change."""

    def __init__(self) -> None:
        self._usual_ns = 0.0
        self._changed_ns = 0.0

    @property
    def ns(self) -> int:
        learned_ns = round(self._changed_ns - self._usual_ns)
        return learned_ns if learned_ns >= _LEAST_NS else 0

    def saw(self, lost_ns: int, *, changed: bool) -> None:
        if changed:
            self._changed_ns += (lost_ns - self._changed_ns) * _NEWEST_SHARE
        else:
            self._usual_ns += (lost_ns - self._usual_ns) * _NEWEST_SHARE
