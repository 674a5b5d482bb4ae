"""A node as the proxy in its own process sees it."""

from __future__ import annotations

from collections.abc import Mapping

from aegis.core.ids import InstanceId, ProxyId
from aegis.core.request import Job
from aegis.node.model_catalogue import LiveModel
from aegis.node.node import Node
from aegis.node.queries import NodeQueries
from aegis.telemetry.registration import RegisteringModel
from aegis.transport.node_messages import Found, FromProxy


class LocalNode:
    """Implements `proxy.live.proxy.NodeLink`."""

    def __init__(self, node: Node, proxy: ProxyId) -> None:
        self.queries = NodeQueries(node)
        self._node = node
        self._proxy = proxy

    def models(self) -> Mapping[str, LiveModel]:
        return self._node.catalogue.models()

    def coming(self) -> Mapping[str, RegisteringModel]:
        return self._node.catalogue.coming()

    def look_up(self, instance: InstanceId, job: Job, found: Found) -> None:
        found(self._node.prefix_of(instance, job))

    def send(self, message: FromProxy) -> None:
        self._node.on_proxy_message(self._proxy, message)
