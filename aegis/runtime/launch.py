"""`aegis launch`: instances, registration, HTTP, and their orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import uvloop
from rich.console import Console

from aegis.config import Config, ModelEntry, RedisSettings
from aegis.core.clock import NS_PER_MS, NS_PER_S, Clock
from aegis.core.errors import ModelRefused, UserError
from aegis.core.estimators import Hardware
from aegis.core.ids import InstanceId, ModelId
from aegis.core.model import Slo
from aegis.core.role import Role, Roles
from aegis.device.host_memory import SharedMemory
from aegis.device.open import create_pool
from aegis.device.shared_words import SharedWords
from aegis.models.cache import default_cache_dir
from aegis.models.sources import Source, read_sources
from aegis.policies import Site, recipe
from aegis.runtime import garbage
from aegis.runtime.catalogue import LiveModel
from aegis.runtime.clock import MonotonicClock
from aegis.runtime.devices import Devices
from aegis.runtime.image_cache import ImageCache
from aegis.runtime.instance_settings import InstanceSettings
from aegis.runtime.link import ProxyLink
from aegis.runtime.market import LiveMarket
from aegis.runtime.pool import WORDS, Pool
from aegis.runtime.store.store import open_store
from aegis.sizes import format_size
from aegis.telemetry import logs
from aegis.telemetry.history import History
from memory.budget import Budget
from prefill.policy import GroupedFcfs
from proxy.http.app import create_app
from proxy.http.server import make_server
from proxy.http.settings import Settings
from proxy.sessions import SessionCore

_START_S = 120.0
_DRAIN_S = 3  # that running requests are given to finish in when the server is ended


def main(config: Config) -> int:
    """Serves until SIGINT or SIGTERM. Returns the exit code; raises UserError for what the user can mend."""
    logs.setup(config.server.log_level)
    listener = _listen(config.server.host, config.server.port)
    _check_sizes(config)
    if config.redis.url and not config.redis.off:
        uvloop.run(_reach(config.redis))
    sources = _sources(config)
    return uvloop.run(_serve(config, listener, sources))


async def _reach(redis: RedisSettings) -> None:
    """Before time is spent on models."""
    async with open_store(redis):
        pass


async def _serve(config: Config, listener: socket.socket, sources: list[Source]) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    console = Console(stderr=True, soft_wrap=True)
    async with AsyncExitStack() as stack:
        store = None if config.redis.off else await stack.enter_async_context(open_store(config.redis))
        market = await stack.enter_async_context(open_market(config))
        if store:
            store.report_to(market.registry)
            store.publish(market.loads)
        started = asyncio.create_task(_bring_up(market, sources, console))
        if not await _first(started, stop):
            return 130
        key = config.server.admin_key
        settings = Settings(admin_key=key.get_secret_value() if key else None)
        server = make_server(
            create_app(market, settings, store.records if store else None),
            host=config.server.host,
            port=listener.getsockname()[1],
            shutdown_s=_DRAIN_S + 5,
        )
        server.capture_signals = contextlib.nullcontext  # type: ignore[assignment, method-assign]  # signals are ours
        serving = asyncio.create_task(server.serve([listener]))
        garbage.seldom()
        _announce(console, market, listener)
        await _first(serving, stop)
        server.should_exit = True
        stop.clear()
        await _drain(market, stop)
        await serving
    console.print("aegis has stopped")
    sys.stdout.flush()
    os._exit(0)  # a thread may still be busy with what a client sent; nothing that it does matters any more


async def _drain(market: LiveMarket, stop: asyncio.Event) -> None:
    """Running requests get a moment to finish in; when it is over, or at a second signal, the rest is failed."""
    market.draining = True
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_S):
            while market.busy and not stop.is_set():
                await asyncio.sleep(0.02)
    market.abandon()


async def _first(task: asyncio.Task[None], stop: asyncio.Event) -> bool:
    """Whether the task ended before the stop; otherwise it goes on. Raises what the task raised."""
    waiting = asyncio.create_task(stop.wait())
    await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if task.done():
        task.result()
        return True
    return False


@asynccontextmanager
async def open_market(
    config: Config,
    *,
    core: SessionCore | None = None,
    placement: Mapping[InstanceId, int] | None = None,
    cache_dir: Path | None = None,
) -> AsyncIterator[LiveMarket]:
    """The market with its processes, which are gone afterwards whatever happens. It serves no model yet. `core` decides
    where requests go, `placement` which device each instance is on; the configuration does where they are not given."""
    names, clock = _instances(config), MonotonicClock()
    devices = _devices(config, placement or _dealt(config, list(names)), clock)
    budget = _budget(config, devices)
    words = SharedWords.create(WORDS)
    kv = SharedMemory.create(budget.host_slabs * budget.slab_bytes, "kv")
    images = ImageCache(config.memory.cache_bytes, check_laws=config.memory.debug)
    with tempfile.TemporaryDirectory(prefix="aegis-") as directory:
        address = f"ipc://{directory}/instances"
        link = ProxyLink(address)
        template = _template(
            config, budget, address=address, words_path=words.path, host_kv_path=kv.path, images_path=images.path
        )
        market = LiveMarket(
            core or _session_core(config, template),
            budget,
            images,
            devices,
            link,
            clock,
            _history(config),
            policy=config.scheduling.policy,
            dtype=_dtype(config),
            cache_dir=cache_dir or default_cache_dir(),
            default_slo=_slo(config),
            check_laws=config.memory.debug,
        )
        pool = market.pool = Pool(template, names, devices.address, link, words, market.lost, market.given_up)
        tasks = [asyncio.create_task(market.listen()), asyncio.create_task(devices.watch())]
        for task in tasks:
            task.add_done_callback(_end_if_broken)
        try:
            pool.start()
            yield market
        finally:
            await pool.close()
            for task in tasks:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            await devices.close()  # what is being wiped is still granted to who waits for it
            link.close()
            images.close()


def _history(config: Config) -> History:
    kept = config.telemetry
    return History(spans=kept.spans, records=kept.records, decisions=kept.decisions, token_times=kept.token_times)


def _session_core(config: Config, settings: InstanceSettings) -> SessionCore:
    groups, policy = GroupedFcfs(config.scheduling.prefill.max_group_size), settings.scheduler()
    prefill = recipe(settings.policy).prefill(Site(memory_bytes=settings.memory_bytes, groups=groups))
    return SessionCore(prefill, policy, Hardware(), max_batch=policy.rules.max_batch, explains=settings.explains)


def _template(
    config: Config, budget: Budget, *, address: str, words_path: str, host_kv_path: str, images_path: str
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
        policy=config.scheduling.policy,
        memory_bytes=budget.pages * budget.page_bytes * config.device_count // budget.instances,
        q_max_ns=_q_max_ns(config),
        switching_share=config.scheduling.decode.switching_share,
        explains=config.telemetry.decisions > 0,
        check_laws=config.memory.debug,
    )


def _q_max_ns(config: Config) -> int:
    return round(config.scheduling.decode.q_max_s * NS_PER_S)


def _end_if_broken(listening: asyncio.Task[None]) -> None:
    """A bug that stopped the market ends the server, rather than leaving its clients to wait for ever."""
    if not listening.cancelled() and listening.exception():
        signal.raise_signal(signal.SIGTERM)


def _check_sizes(config: Config) -> None:
    """Memory that the machine does not have is refused before anything is started."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    sizes = {"--host-memory": config.memory.host}
    if config.device == "cpu":
        sizes["--device-memory"] = config.memory.device * config.device_count
    for option, size in sizes.items():
        if size > machine:
            raise UserError(
                f"{option} {format_size(size)} is more than this machine has ({machine / (1 << 30):.0f}GiB)"
            )
    instances = len(_instances(config))
    if _host_slabs(config) < 2 * instances:
        raise UserError(
            f"--host-memory without --model-cache holds {_host_slabs(config)} KV slabs, {instances} instances need "
            f"{2 * instances}; raise it"
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
        host_slabs=_host_slabs(config),
        instances=len(_instances(config)),
    )


def _host_slabs(config: Config) -> int:
    return (config.memory.host - config.memory.cache_bytes) // config.memory.slab


def _instances(config: Config) -> dict[InstanceId, Role]:
    """In order."""
    sizes = config.instances
    if sizes.mixed or recipe(config.scheduling.policy).roles_of(sizes.roles, counted=sizes.counted) is Roles.AUTO:
        counts = {Role.MIXED: sizes.count}
    else:
        counts = {Role.PREFILL: sizes.prefill, Role.DECODE: sizes.decode}
    return {InstanceId(f"{role}-{i}"): role for role, count in counts.items() for i in range(count)}


def _dtype(config: Config) -> str:
    return "bfloat16" if config.device == "cuda" and config.dtype == "auto" else config.dtype


def _slo(config: Config) -> Slo:
    return Slo(round(config.slo.ttft_ms * NS_PER_MS), round(config.slo.tbt_ms * NS_PER_MS))


def _sources(config: Config) -> list[Source]:
    sources = [_source(ModelId(name), entry, config) for name, entry in config.models.items()]
    sources += read_sources(config.sources, default_slo=_slo(config))
    if config.serves_demo:
        from aegis.models.demo import demo_models, make_market

        make_market()
        sources += demo_models(default_cache_dir())
    names = [source.model for source in sources]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"two models are named '{name}'; rename one", param="models")
    return sources


def _source(model: ModelId, entry: ModelEntry, config: Config) -> Source:
    ttft_ms = entry.slo.ttft_ms or config.slo.ttft_ms
    tbt_ms = entry.slo.tbt_ms or config.slo.tbt_ms
    slo = Slo(round(ttft_ms * NS_PER_MS), round(tbt_ms * NS_PER_MS))
    path = str(Path(entry.path).expanduser().resolve()) if entry.path else None
    return Source(model, path, entry.hub, slo, entry.dtype, entry.pin)


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()  # from now on nobody else can
    except OSError as error:
        raise UserError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from error
    return listener


async def _bring_up(market: LiveMarket, sources: list[Source], console: Console) -> None:
    """Registers everything and waits for the instances; at least one model has to be served."""
    refused = 0
    with console.status("starting") as status:
        report = lambda model, text: status.update(f"{model}: {text}")  # noqa: E731
        async for source, outcome in market.catalogue.register(sources, report):
            if isinstance(outcome, ModelRefused):
                refused += 1
                console.print(f"refused {source.model}: {outcome.message}", highlight=False, markup=False)
        if refused == len(sources):
            raise UserError("no model can be served; see the reasons above")
        status.update("waiting for the instances")
        try:
            async with asyncio.timeout(_START_S):
                while not market.ready()[0]:
                    if not market.healthy()[0]:
                        raise UserError(f"an instance {market.healthy()[1]}")
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise UserError(f"after {_START_S:.0f} s still {market.ready()[1]}; see the log above") from None


def _announce(console: Console, market: LiveMarket, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    models: list[LiveModel] = list(market.models().values())
    out = Console(highlight=False, soft_wrap=True)
    out.print(f"aegis serves {len(models)} models on {url}")
    for model in models:
        manifest = model.spec.manifest
        out.print(f"  {model.spec.model:24} {manifest.architecture:24} {manifest.image_bytes / (1 << 20):8.1f} MiB")
    out.print("try it:")
    wish = {"model": models[0].spec.model, "prompt": "Tell me a story.", "max_tokens": 64, "temperature": 0}
    body = json.dumps(wish | {"stream": True})
    out.print(f"  curl -N {url}/v1/completions -H 'Content-Type: application/json' -d '{body}'", markup=False)
    out.print("Ctrl-C stops everything.")
    sys.stdout.flush()
