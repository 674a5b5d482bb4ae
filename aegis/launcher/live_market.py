"""A market opened: a node with its instances' processes and the proxy beside it, as a configuration says."""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from aegis.config.config import Config
from aegis.control.bus import Bus
from aegis.control.settings import BusSettings
from aegis.core.clock import NS_PER_MS, NS_PER_S, Clock
from aegis.core.ids import InstanceId, ProxyId
from aegis.core.messages import FromInstance
from aegis.core.model import PEERS_MAX, ModelSpec, Slo
from aegis.core.request import Job
from aegis.core.role import Role
from aegis.device.performance import figures
from aegis.instance.settings import InstanceSettings
from aegis.launcher.placing import Placing
from aegis.launcher.role_shift import RoleShift
from aegis.launcher.services import Services
from aegis.metadata.loads import loads_of
from aegis.models.cache import default_cache_dir
from aegis.models.terms import Terms
from aegis.node import instance_processes
from aegis.node.catalogue.model import CatalogueModel
from aegis.node.control_commands import NodeControl
from aegis.node.devices import Devices
from aegis.node.instance_supervisor import InstanceSupervisor
from aegis.node.market_machines import MarketMachines, open_local_machines
from aegis.node.node import Node
from aegis.node.queries import NodeQueries
from aegis.node.registration import register
from aegis.node.sizing import host_slabs_of, instances_of
from aegis.process.clock import MonotonicClock
from aegis.process.forked_processes import ForkServer
from aegis.scheduling_settings import SchedulingSettings
from aegis.telemetry.history import History
from aegis.telemetry.logs import LogSettings
from aegis.telemetry.registration import RegisteringModel
from aegis.telemetry.request_stages import RequestStages
from aegis.transport.addresses import Wires
from aegis.transport.links import Hub, NodeMessage
from aegis.transport.node_messages import FromProxy, OnPrefixFound
from memory.budget import Budget
from memory.peers.links import PeerLinks
from proxy.http.responses.stored_responses import RESPONSES_TTL_S, ResponseMemory
from proxy.live.proxy import Proxy
from proxy.live.serving import running
from proxy.routing.router import Router

_PROXY = ProxyId(0)


class LocalNode:
    """Implements `proxy.live.proxy.NodeLink`."""

    def __init__(self, node: Node, proxy: ProxyId, *, responses_ttl_s: float = RESPONSES_TTL_S) -> None:
        self.queries = NodeQueries(node, ResponseMemory(responses_ttl_s))
        self._node = node
        self._proxy = proxy

    def models(self) -> Mapping[str, CatalogueModel]:
        return self._node.catalogue.models()

    def coming(self) -> Mapping[str, RegisteringModel]:
        return self._node.catalogue.coming()

    def look_up(self, instance: InstanceId, job: Job, found: OnPrefixFound) -> None:
        found(self._node.prefix_of(instance, job))

    def notify(self, message: FromProxy) -> None:
        self._node.on_proxy_message(self._proxy, message)


@dataclass(frozen=True, slots=True)
class LiveMarket:
    """A node, and the proxy in its process; where others are to listen for instances."""

    node: Node
    queries: NodeQueries
    proxy: Proxy
    scheduling: SchedulingSettings
    wires: Wires


@asynccontextmanager
async def open_market(
    config: Config,
    services: Services,
    *,
    router: Router | None = None,
    placement: Mapping[InstanceId, int] | None = None,
    cache_dir: Path | None = None,
    stages: RequestStages | None = None,
    architectures: Sequence[str] = (),
) -> AsyncIterator[LiveMarket]:
    """The market with its processes, which are gone afterwards whatever happens. It serves no model yet. `router`
    decides where requests go, `placement` which device each instance is on; the configuration does where they are not
    given. `architectures` are imported before instances are forked."""
    names, clock = instances_of(config), MonotonicClock()
    async with AsyncExitStack() as stack:
        ranks = config.instances.tensor_parallel_size
        fork_server = stack.enter_context(
            closing(instance_processes.fork_server(len(names) * ranks, config.engine, architectures))
        )
        machines = await stack.enter_async_context(
            _open_machines(config, names, placement, services, clock, fork_server)
        )
        budget, wires = _budget(config, machines.devices), machines.wires
        link = stack.enter_context(closing(Hub[NodeMessage](wires.address("node"), NodeMessage, wires.keys)))
        proxy_link = stack.enter_context(
            closing(Hub[FromInstance](wires.address(f"proxy-{_PROXY}"), FromInstance, wires.keys))
        )
        template = _template(config, budget, bus=services.bus.settings, address=link.address, wires=wires)
        terms = _terms(config, cache_dir or default_cache_dir())
        node = _node(config, machines, budget, link, clock, services.bus, terms, fork_server)
        pool = node.pool = InstanceSupervisor(template, names, machines.instance_hosts, link, node.lost, node.given_up)
        near = LocalNode(node, _PROXY, responses_ttl_s=config.redis.responses_ttl_s)
        router, late = router or template.router(), config.server.refuse_late
        proxy = Proxy(_PROXY, router, near, proxy_link, clock, node.history, stages=stages, refuses_late=late)
        node.join(_PROXY, proxy)
        if services.store:
            services.store.report_to(proxy.registry)
            services.store.publish(lambda: loads_of(node.reports, pool.roles()))
        async with running(node.listen(), proxy.listen(), machines.devices.watch()):
            pool.start()
            control = NodeControl(node, near.queries, clock)
            shifting = (RoleShift(node, router, control, clock).run(),) if config.instances.change_roles else ()
            placing = _placing(config, node, router, template, clock)
            try:
                with services.bus.serving(control):
                    async with running(*shifting, *placing):
                        yield LiveMarket(node, near.queries, proxy, template, wires)
            finally:
                await pool.close()


def _open_machines(
    config: Config,
    names: Mapping[InstanceId, Role],
    placement: Mapping[InstanceId, int] | None,
    services: Services,
    clock: Clock,
    fork_server: ForkServer,
) -> AbstractAsyncContextManager[MarketMachines]:
    if config.ray.address:
        from aegis.cluster.cluster_machines import open_cluster_machines

        return open_cluster_machines(config, list(names), services.directory, clock)
    return open_local_machines(config, placement or _dealt(config, list(names)), services.directory, clock, fork_server)


def _build_nothing(spec: ModelSpec) -> None:
    """Instances on other machines are not forked here."""


def _node(
    config: Config,
    machines: MarketMachines,
    budget: Budget,
    link: Hub[NodeMessage],
    clock: Clock,
    bus: Bus,
    terms: Terms,
    fork_server: ForkServer,
) -> Node:
    build_before = _build_nothing if config.ray.address else partial(instance_processes.build_before, fork_server)
    return Node(
        budget,
        machines.images,
        machines.hosts,
        machines.devices,
        link,
        clock,
        _history(config),
        policy=config.scheduling.policy,
        terms=terms,
        default_slo=slo_of(config),
        hardware=figures(config.device),
        register=partial(register, fork_server=fork_server),
        bus=bus,
        reuses=_reuses(config),
        fetching=machines.fetching,
        check_laws=config.memory.debug,
        peer_links=PeerLinks(PEERS_MAX) if config.instances.peer_loads else None,
        build_before=build_before,
    )


def _terms(config: Config, cache_dir: Path) -> Terms:
    return Terms(
        str(cache_dir),
        _dtype(config),
        config.engine,
        config.instances.tensor_parallel_size,
        packs=config.device == "cpu",
        weights=config.weights,
        disk_bytes=config.memory.cache_size,
    )


def _history(config: Config) -> History:
    kept = config.telemetry
    return History(spans=kept.spans, records=kept.records, decisions=kept.decisions, token_times=kept.token_times)


def _placing(
    config: Config, node: Node, router: Router, scheduling: SchedulingSettings, clock: Clock
) -> tuple[Coroutine[Any, Any, None], ...]:
    policy = None if config.scheduling.migrates is False else scheduling.placement()
    idle_s = config.scheduling.model_idle_s
    if policy is None and idle_s is None:
        return ()
    idle_ns = None if idle_s is None else round(idle_s * NS_PER_S)
    return (Placing(node, router, policy, scheduling.hardware, clock, idle_ns=idle_ns).run(),)


def _template(config: Config, budget: Budget, *, bus: BusSettings, address: str, wires: Wires) -> InstanceSettings:
    """The settings that all instances share; the pool adds the identity of each."""
    return InstanceSettings(
        instance=InstanceId(""),
        incarnation=0,
        role=Role.MIXED,
        address=address,
        market_key=wires.market_key,
        words_path="",
        words=(),
        host_kv_path="",
        images_path="",
        device=config.device,
        device_address="",
        slab_bytes=budget.slab_bytes,
        host_slabs=budget.host_slabs,
        instances=budget.instances,
        on_device=budget.on_device,
        bus=bus,
        logs=log_settings(config),
        policy=config.scheduling.policy,
        max_group_size=config.scheduling.prefill.max_group_size,
        memory_bytes=budget.pages * budget.page_bytes * config.device_count // budget.instances,
        q_max_ns=round(config.scheduling.decode.q_max_s * NS_PER_S),
        switching_share=config.scheduling.decode.switching_share,
        hardware=figures(config.device),
        engine=config.engine,
        lanes=config.instances.lanes,
        peer_loads=config.instances.peer_loads,
        step_tokens=config.scheduling.step_tokens,
        explains=config.telemetry.decisions > 0,
        reuses=_reuses(config),
        check_laws=config.memory.debug,
    )


def _dealt(config: Config, instances: list[InstanceId]) -> dict[InstanceId, int]:
    """Instances are dealt to the devices, or the groups of them, in turn."""
    return {instance: index % config.device_count for index, instance in enumerate(instances)}


def _budget(config: Config, devices: Devices) -> Budget:
    return Budget(
        pages=devices.page_count,
        page_bytes=devices.page_bytes,
        slab_bytes=config.memory.slab,
        host_slabs=host_slabs_of(config),
        instances=len(instances_of(config)),
        on_device=-(-len(instances_of(config)) // config.device_count),
    )


def _reuses(config: Config) -> bool:
    return config.memory.prefix_reuse == "on"


def _dtype(config: Config) -> str:
    return "bfloat16" if config.device == "cuda" and config.dtype == "auto" else config.dtype


def log_settings(config: Config) -> LogSettings:
    """The log settings of all processes."""
    return LogSettings(config.server.log_level, config.server.log_format, config.server.log_prompts)


def slo_of(config: Config) -> Slo:
    slo = config.slo
    return Slo(round(slo.ttft_ms * NS_PER_MS), round(slo.tbt_ms * NS_PER_MS), round(slo.gap_ms * NS_PER_MS))
