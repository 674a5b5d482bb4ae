"""Queries to a node, which come through any of its proxies."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from aegis.core.decision import Decision
from aegis.core.model import ModelChange
from aegis.node.catalogue.model import CatalogueModel
from aegis.node.live_view_builder import LiveViewBuilder
from aegis.node.node import Node
from aegis.telemetry.live_view import SeenUntil
from aegis.telemetry.memory_report import MemoryReport, report_device, report_host_kv, report_model_cache
from aegis.telemetry.metrics.scrape import exposition, in_slices, scrape, total
from aegis.telemetry.node_report import NodeReport
from aegis.telemetry.records import Record
from aegis.telemetry.registration import Waiting
from aegis.telemetry.spans import Span
from proxy.http.responses.stored_responses import ResponseMemory, ResponseStore


class NodeQueries:
    """Implements `proxy.http.market.ServerQueries`."""

    def __init__(self, node: Node, responses: ResponseStore | None = None) -> None:
        """`responses` are those of all proxies, where no store of theirs has them."""
        self._node = node
        self._responses = responses or ResponseMemory()
        self._view = LiveViewBuilder(node)

    def models(self) -> Mapping[str, CatalogueModel]:
        return self._node.catalogue.models()

    def is_healthy(self) -> tuple[bool, str]:
        dead = [*self._node.pool.dead(), *self._node.proxies.dead()]
        return not dead, f"does not come up any more: {', '.join(dead)}" if dead else "ok"

    def is_ready(self) -> tuple[bool, str]:
        if self._node.draining:
            return False, "draining"
        unbound = self._node.catalogue.unbound() - self._node.pool.coming()
        missing = {*self._node.pool.missing(), *unbound, *self._node.proxies.missing()}
        return not missing, f"waiting for {', '.join(sorted(missing))}" if missing else "ok"

    async def healthy(self) -> tuple[bool, str]:
        return self.is_healthy()

    async def ready(self) -> tuple[bool, str]:
        return self.is_ready()

    async def add_model(
        self, source: str, name: str | None, *, lazy: bool = False, base: str | None = None
    ) -> CatalogueModel | Waiting:
        return await self._node.catalogue.add(source, name, lazy=lazy, base=base)

    async def remove_model(self, name: str) -> None:
        await self._node.catalogue.remove(name)

    async def unload_model(self, name: str) -> CatalogueModel:
        return self._node.catalogue.unload(name)

    async def change_model(self, name: str, change: ModelChange) -> CatalogueModel:
        return await self._node.catalogue.change(name, change)

    async def metrics(self) -> bytes:
        scrapes = await self._node.proxies.scrapes()
        own = await in_slices(scrape(self._node.metrics.registry))
        return b"".join(await in_slices(exposition(total([own, *scrapes]))))

    async def spans(self, since: int) -> tuple[list[Span], int]:
        return self._node.history.spans.since(since), self._node.history.spans.next

    async def records(self, since: int) -> tuple[list[Record], int]:
        return self._node.history.records.since(since), self._node.history.records.next

    async def decisions(self, since: int) -> tuple[list[Decision], int]:
        return self._node.history.decisions.since(since), self._node.history.decisions.next

    async def report(self) -> NodeReport:
        node = self._node
        return NodeReport(
            node.policy,
            len(node.devices.arbiters()),
            node.devices.page_count * node.devices.page_bytes,
            node.budget.slab_bytes,
            node.budget.host_slabs * node.budget.slab_bytes,
            node.pool.roles(),
            tuple(model.spec.without_tensors() for model in node.catalogue.models().values()),
            bus=node.bus.place if node.bus else None,
        )

    async def live(self, seen: SeenUntil) -> bytes:
        return msgspec.json.encode(self._view.live(seen, self.memory()))

    def memory(self) -> MemoryReport:
        node = self._node
        page_bytes = node.devices.page_bytes
        image_bytes = {model.spec.model: model.spec.manifest.image_bytes for model in node.catalogue.models().values()}
        return MemoryReport(
            tuple(
                report_device(ordinal, arbiter, node.reports, image_bytes, page_bytes=page_bytes)
                for ordinal, arbiter in enumerate(node.devices.arbiters())
            ),
            report_host_kv(node.host, node.reports.values(), slab_bytes=node.budget.slab_bytes),
            report_model_cache(node.images.images(), node.images.accounts(), node.images.counters()),
        )

    async def memory_report(self) -> MemoryReport:
        return self.memory()

    async def limit_memory(self, instance: str, nbytes: int, *, timeout_s: float) -> int:
        least_bytes = self._node.catalogue.least_pages() * self._node.devices.page_bytes
        return await self._node.devices.limit(instance, nbytes, least_bytes=least_bytes, timeout_s=timeout_s)

    async def trim_memory(self, instance: str, *, timeout_s: float) -> int:
        return await self._node.devices.trim(instance, timeout_s=timeout_s)

    async def keep_response(self, key: str, stored: bytes) -> None:
        await self._responses.keep(key, stored)

    async def find_response(self, key: str) -> bytes | None:
        return await self._responses.find(key)

    async def remove_response(self, key: str) -> bool:
        return await self._responses.remove(key)

    async def cancel_response(self, key: str) -> bytes | None:
        return await self._node.proxies.cancel_response(key)
