"""Time is an argument: cores receive integer nanoseconds with every event. Only shells hold a clock."""

from typing import Final, Protocol

NS_PER_S: Final = 1_000_000_000
NS_PER_MS: Final = 1_000_000


class Clock(Protocol):
    """Monotonic, and the same for all processes of a node."""

    def now_ns(self) -> int: ...
