"""A market opened: a node with its instances' processes and the proxy beside it, as a configuration says."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from aegis.config import Config
from aegis.core.clock import NS_PER_MS, NS_PER_S, Clock
from aegis.core.ids import InstanceId, ProxyId
from aegis.core.messages import FromInstance
from aegis.core.model import Slo
from aegis.core.role import Role, Roles
from aegis.device.host_memory import SharedMemory
from aegis.device.open import create_pool
from aegis.device.shared_words import SharedWords
from aegis.models.cache import default_cache_dir
from aegis.policies import recipe
from aegis.runtime.bus.node import NodeControl
from aegis.runtime.bus.settings import BusSettings
from aegis.runtime.clock import MonotonicClock
from aegis.runtime.desk import NodeDesk
from aegis.runtime.devices import Devices
from aegis.runtime.image_cache import ImageCache
from aegis.runtime.instance_settings import InstanceSettings
from aegis.runtime.link import Hub, Said
from aegis.runtime.near import NearNode
from aegis.runtime.node import Node
from aegis.runtime.pool import WORDS, Pool
from aegis.runtime.proxy import Proxy
from aegis.runtime.scheduling_settings import SchedulingSettings
from aegis.runtime.services import Services
from aegis.runtime.serving import running
from aegis.runtime.store.loads import loads_of
from aegis.telemetry.history import History
from memory.budget import Budget
from proxy.sessions import SessionCore

_PROXY = ProxyId(0)


@dataclass(frozen=True, slots=True)
class LiveMarket:
    """A node, and the proxy in its process."""

    node: Node
    desk: NodeDesk
    proxy: Proxy
    scheduling: SchedulingSettings


@asynccontextmanager
async def open_market(
    config: Config,
    services: Services,
    *,
    core: SessionCore | None = None,
    placement: Mapping[InstanceId, int] | None = None,
    cache_dir: Path | None = None,
) -> AsyncIterator[LiveMarket]:
    """The market with its processes, which are gone afterwards whatever happens. It serves no model yet. `core` decides
    where requests go, `placement` which device each instance is on; the configuration does where they are not given."""
    names, clock = instances_of(config), MonotonicClock()
    devices = _devices(config, placement or _dealt(config, list(names)), clock)
    budget = _budget(config, devices)
    words = SharedWords.create(WORDS)
    kv = SharedMemory.create(budget.host_slabs * budget.slab_bytes, "kv")
    images = ImageCache(config.memory.cache_bytes, check_laws=config.memory.debug)
    link, proxy_link = _hubs(services.directory)
    paths = {"words_path": words.path, "host_kv_path": kv.path, "images_path": images.path}
    template = _template(config, budget, bus=services.bus.settings, address=link.address, **paths)
    node = Node(
        budget,
        images,
        devices,
        link,
        clock,
        _history(config),
        policy=config.scheduling.policy,
        dtype=_dtype(config),
        engine=config.engine,
        cache_dir=cache_dir or default_cache_dir(),
        default_slo=slo_of(config),
        bus=services.bus,
        check_laws=config.memory.debug,
    )
    pool = node.pool = Pool(template, names, devices.address, link, words, node.lost, node.given_up)
    near = NearNode(node, _PROXY)
    proxy = Proxy(_PROXY, core or template.session_core(), near, proxy_link, clock, node.history)
    node.join(_PROXY, proxy)
    if services.store:
        services.store.report_to(proxy.registry)
        services.store.publish(lambda: loads_of(node.reports, pool.roles()))
    try:
        async with running(node.listen(), proxy.listen(), devices.watch()):
            pool.start()
            try:
                with services.bus.serving(NodeControl(node, near.desk, clock)):
                    yield LiveMarket(node, near.desk, proxy, template)
            finally:
                await pool.close()
    finally:
        await devices.close()  # what is being wiped is still granted to who waits for it
        for part in (link, proxy_link, images):
            part.close()


def _hubs(directory: str) -> tuple[Hub[Said], Hub[FromInstance]]:
    """Where instances reach the node, and the proxy."""
    return Hub(f"ipc://{directory}/node", Said), Hub(f"ipc://{directory}/proxy-{_PROXY}", FromInstance)


def _history(config: Config) -> History:
    kept = config.telemetry
    return History(spans=kept.spans, records=kept.records, decisions=kept.decisions, token_times=kept.token_times)


def _template(
    config: Config,
    budget: Budget,
    *,
    bus: BusSettings,
    address: str,
    words_path: str,
    host_kv_path: str,
    images_path: str,
) -> InstanceSettings:
    """What all instances are told alike; the pool adds who each of them is."""
    return InstanceSettings(
        instance=InstanceId(""),
        incarnation=0,
        role=Role.MIXED,
        address=address,
        words_path=words_path,
        words=(),
        host_kv_path=host_kv_path,
        images_path=images_path,
        device=config.device,
        device_address="",
        slab_bytes=budget.slab_bytes,
        host_slabs=budget.host_slabs,
        instances=budget.instances,
        bus=bus,
        policy=config.scheduling.policy,
        max_group_size=config.scheduling.prefill.max_group_size,
        memory_bytes=budget.pages * budget.page_bytes * config.device_count // budget.instances,
        q_max_ns=round(config.scheduling.decode.q_max_s * NS_PER_S),
        switching_share=config.scheduling.decode.switching_share,
        engine=config.engine,
        explains=config.telemetry.decisions > 0,
        check_laws=config.memory.debug,
    )


def _dealt(config: Config, instances: list[InstanceId]) -> dict[InstanceId, int]:
    """Instances are dealt to the devices in turn."""
    return {instance: index % config.device_count for index, instance in enumerate(instances)}


def _devices(config: Config, placement: Mapping[InstanceId, int], clock: Clock) -> Devices:
    ordinals = range(config.device_count)
    return Devices(
        [create_pool(config.device, config.memory.device, ordinal=ordinal) for ordinal in ordinals],
        placement,
        clock,
        floor_bytes=config.memory.floor,
        idle_s=config.memory.idle_s,
        check_laws=config.memory.debug,
    )


def _budget(config: Config, devices: Devices) -> Budget:
    """What of the host memory is not the model cache's is for KV."""
    return Budget(
        pages=devices.page_count,
        page_bytes=devices.page_bytes,
        slab_bytes=config.memory.slab,
        host_slabs=host_slabs_of(config),
        instances=len(instances_of(config)),
    )


def host_slabs_of(config: Config) -> int:
    return (config.memory.host - config.memory.cache_bytes) // config.memory.slab


def instances_of(config: Config) -> dict[InstanceId, Role]:
    """By name, in order."""
    sizes = config.instances
    if sizes.mixed or recipe(config.scheduling.policy).roles_of(sizes.roles, counted=sizes.counted) is Roles.AUTO:
        counts = {Role.MIXED: sizes.count}
    else:
        counts = {Role.PREFILL: sizes.prefill, Role.DECODE: sizes.decode}
    return {InstanceId(f"{role}-{i}"): role for role, count in counts.items() for i in range(count)}


def _dtype(config: Config) -> str:
    return "bfloat16" if config.device == "cuda" and config.dtype == "auto" else config.dtype


def slo_of(config: Config) -> Slo:
    return Slo(round(config.slo.ttft_ms * NS_PER_MS), round(config.slo.tbt_ms * NS_PER_MS))
