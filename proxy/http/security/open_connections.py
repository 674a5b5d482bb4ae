"""A bound on open connections, each of which takes a file descriptor: beyond it, the connection that has waited longest
for its client's request ends. So descriptors are left for other files of the process, and for the next client."""

from __future__ import annotations

import resource
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

OPEN_MAX = 1 << 14
"""However many descriptors there are: each takes some 25 KiB."""

_RESERVED_MAX = 4096
"""Descriptors for all that is no connection, and for those that are accepted before any of them ends."""

C = TypeVar("C", bound=Hashable)


def connections_max() -> int:
    """The largest number of connections, by the number of files that this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return OPEN_MAX
    return min(soft - min(soft // 2, _RESERVED_MAX), OPEN_MAX)


class OpenConnections(Generic[C]):
    """The open connections of one process."""

    __slots__ = ("_connections_max", "_end", "_open", "_waiting")

    def __init__(self, connections_max: int, end: Callable[[C], None]) -> None:
        """`end` is told a connection that has to go, once."""
        self._connections_max = connections_max
        self._end = end
        self._open: set[C] = set()
        self._waiting: dict[C, None] = {}

    def __len__(self) -> int:
        return len(self._open)

    def opened(self, connection: C) -> None:
        """It waits for its first request. Ends the one that has waited longest where there are too many; that may be
        itself, if all others are being answered."""
        self._open.add(connection)
        self._waiting[connection] = None
        if len(self._open) > self._connections_max:
            longest = next(iter(self._waiting))
            self.closed(longest)
            self._end(longest)

    def closed(self, connection: C) -> None:
        """Harmless where it was said before."""
        self._open.discard(connection)
        self._waiting.pop(connection, None)

    def request_complete(self, connection: C) -> None:
        """All of a request is there: it is answered, however many there are."""
        self._waiting.pop(connection, None)

    def answered(self, connection: C) -> None:
        """The request of the connection is answered; it waits for the next one."""
        if connection in self._open:
            self._waiting[connection] = None
