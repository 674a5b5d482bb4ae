"""Frees what the requests of a lost proxy held: everywhere, each thing once.

(1) Every instance drops the requests, and answers when no transfer for them is left. (2) When all have answered, or are
lost themselves, nobody reads KV that was handed over for them, and its owners release it.
"""

from __future__ import annotations

from collections.abc import Iterable

from aegis.core.ids import InstanceId, ProxyId


class LostProxies:
    """Proxies that are lost and not forgotten yet."""

    def __init__(self) -> None:
        self._awaited: dict[ProxyId, set[InstanceId]] = {}

    def begin(self, proxy: ProxyId, instances: Iterable[InstanceId]) -> None:
        """These were asked to drop the proxy."""
        awaited = set(instances)
        if awaited:
            self._awaited[proxy] = awaited

    def dropped(self, proxy: ProxyId, instance: InstanceId) -> bool:
        """Whether that was the last of them."""
        awaited = self._awaited[proxy]
        awaited.discard(instance)
        if not awaited:
            del self._awaited[proxy]
        return not awaited

    def lost(self, instance: InstanceId) -> list[ProxyId]:
        """Returns the lost proxies for which no other answer is awaited any more."""
        return [proxy for proxy in list(self._awaited) if self.dropped(proxy, instance)]
