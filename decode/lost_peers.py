"""Lost instances, whose KV was adopted here, and lost proxies. Each loss is answered once nothing is read any more from
the memory of the instance, or for the requests of the proxy."""

from __future__ import annotations

from collections.abc import Callable

from aegis.core.ids import InstanceId, ProxyId
from aegis.core.messages import FromInstance, PeerForgotten, ProxyDropped
from decode.kv_arrivals import Arrivals
from decode.kv_swap import KvSwap


class LostPeers:
    """The losses that one instance has to answer."""

    def __init__(self, kv: KvSwap, arrivals: Arrivals, send: Callable[[FromInstance], None]) -> None:
        self._kv = kv
        self._arrivals = arrivals
        self._send = send
        self._peers: list[InstanceId] = []  # one entry per question
        self._proxies: list[ProxyId] = []  # whose requests' KV may still be on its way here

    def __bool__(self) -> bool:
        return bool(self._peers or self._proxies)

    def forget(self, peer: InstanceId) -> None:
        self._peers.append(peer)

    def drop(self, proxy: ProxyId) -> None:
        self._proxies.append(proxy)

    def answer(self) -> None:
        done = [peer for peer in self._peers if not self._reads_from(peer)]
        self._peers = [peer for peer in self._peers if peer not in done]
        for peer in done:
            self._send(PeerForgotten(peer))
        parted = [proxy for proxy in self._proxies if not self._reads_for(proxy)]
        self._proxies = [proxy for proxy in self._proxies if proxy not in parted]
        for proxy in parted:
            self._send(ProxyDropped(proxy))

    def _reads_from(self, peer: InstanceId) -> bool:
        return self._kv.reads_from(peer) or self._arrivals.reads_from(peer)

    def _reads_for(self, proxy: ProxyId) -> bool:
        return self._kv.reads_for(proxy) or self._arrivals.reads_for(proxy)
