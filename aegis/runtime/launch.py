"""`aegis launch`: instances, registration, HTTP, and their orderly end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import uvloop
from rich.console import Console

from aegis.config import Config, ModelEntry
from aegis.core.clock import NS_PER_MS
from aegis.core.errors import ModelRefused, UserError
from aegis.core.ids import ModelId, ProxyId
from aegis.core.model import Slo
from aegis.engine import vllm_version
from aegis.models.cache import default_cache_dir
from aegis.models.sources import Source, is_checkpoint, read_sources
from aegis.runtime import garbage
from aegis.runtime.catalogue import LiveModel
from aegis.runtime.listening import listen
from aegis.runtime.opening import LiveMarket, host_slabs_of, instances_of, open_market, slo_of
from aegis.runtime.proxies import Proxies, open_proxies
from aegis.runtime.proxy_settings import ProxySettings
from aegis.runtime.services import Services, open_services
from aegis.runtime.serving import DRAIN_S, drained, http_server
from aegis.sizes import format_size
from aegis.telemetry import logs

_START_S = 120.0


def main(config: Config) -> int:
    """Serves until SIGINT or SIGTERM. Returns the exit code; raises UserError for what the user can mend."""
    logs.setup(config.server.log_level)
    listener = listen(config.server.host, config.server.port, shared=config.server.proxies > 1)
    _check_sizes(config)
    _refuse_without_engine(config)
    sources = _sources(config)
    return uvloop.run(_serve(config, listener, sources))


async def _serve(config: Config, listener: socket.socket, sources: list[Source]) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    console = Console(stderr=True, soft_wrap=True)
    async with AsyncExitStack() as stack:
        services = await stack.enter_async_context(open_services(config))
        if config.serves_demo and not await _first(asyncio.create_task(_make_demo()), stop):
            return 130
        market = await stack.enter_async_context(open_market(config, services))
        template = _proxy_template(config, market, services, listener)
        proxies = await stack.enter_async_context(
            open_proxies(config.server.proxies - 1, template, market, services.store, drain_s=DRAIN_S + 5)
        )
        started = asyncio.create_task(_bring_up(market, proxies, sources, console))
        if not await _first(started, stop):
            return 130
        server = http_server(market.proxy, listener, services.store, admin_key=template.admin_key, name="proxy-0")
        serving = asyncio.create_task(server.serve([listener]))
        garbage.seldom()
        _announce(console, market, listener)
        await _first(serving, stop)
        server.should_exit = True
        stop.clear()
        market.node.drain(DRAIN_S)
        await drained(market.proxy, stop, within_s=DRAIN_S)
        if stop.is_set():
            market.node.drain(0)
        await serving
    console.print("aegis has stopped")
    sys.stdout.flush()
    os._exit(0)  # a thread may still be busy with what a client sent; nothing that it does matters any more


def _proxy_template(config: Config, market: LiveMarket, services: Services, listener: socket.socket) -> ProxySettings:
    """What all further proxies are told alike."""
    scheduling, admin_key = market.scheduling, config.server.admin_key
    return ProxySettings(
        policy=scheduling.policy,
        memory_bytes=scheduling.memory_bytes,
        max_group_size=scheduling.max_group_size,
        q_max_ns=scheduling.q_max_ns,
        switching_share=scheduling.switching_share,
        explains=scheduling.explains,
        name="",
        number=ProxyId(0),
        node_address=f"ipc://{services.directory}/proxies",
        address=f"ipc://{services.directory}/proxy",
        host=config.server.host,
        port=listener.getsockname()[1],
        log_level=config.server.log_level,
        admin_key=admin_key.get_secret_value() if admin_key else None,
        records=config.telemetry.records,
        decisions=config.telemetry.decisions,
        token_times=config.telemetry.token_times,
        store=services.store.settings if services.store else None,
    )


async def _first(task: asyncio.Task[None], stop: asyncio.Event) -> bool:
    """Whether the task ended before the stop; otherwise it goes on. Raises what the task raised."""
    waiting = asyncio.create_task(stop.wait())
    await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if task.done():
        task.result()
        return True
    return False


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
    instances = len(instances_of(config))
    if host_slabs_of(config) < 2 * instances:
        raise UserError(
            f"--host-memory without --model-cache holds {host_slabs_of(config)} KV slabs, {instances} instances need "
            f"{2 * instances}; raise it"
        )


def _refuse_without_engine(config: Config) -> None:
    """Raises UserError; a model that asks for an engine of its own is refused alone."""
    if config.engine == "vllm" and (reason := vllm_version.refusal()):
        raise UserError(reason, param="engine")


def _sources(config: Config) -> list[Source]:
    sources = [_source(ModelId(name), entry, config) for name, entry in config.models.items()]
    sources += read_sources(config.sources, default_slo=slo_of(config))
    if config.serves_demo:
        from aegis.models.demo import demo_models

        sources += demo_models(default_cache_dir(), slo=slo_of(config))
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
    return Source(model, path, entry.hub, slo, entry.dtype, entry.pin, entry.engine)


async def _make_demo() -> None:
    """In a process of its own, for it takes a minute, in which what is open wants to be attended to."""
    from aegis.models.demo import demo_models

    if all(is_checkpoint(Path(source.root)) for source in demo_models(default_cache_dir())):
        return
    making = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "aegis.cli",
        "demo",
        stdout=asyncio.subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # which a shell may have it ignore
    )
    try:
        if await making.wait():
            raise UserError("the demo market could not be made; the reason is above")
    finally:
        if making.returncode is None:
            making.send_signal(signal.SIGINT)  # what is made is kept
            await making.wait()


async def _bring_up(market: LiveMarket, proxies: Proxies, sources: list[Source], console: Console) -> None:
    """Registers everything and waits for the instances and proxies; at least one model has to be served."""
    refused = 0
    with console.status("starting") as status:
        report = lambda model, text: status.update(f"{model}: {text}")  # noqa: E731
        async for source, outcome in market.node.catalogue.register(sources, report):
            if isinstance(outcome, ModelRefused):
                refused += 1
                console.print(f"refused {source.model}: {outcome.message}", highlight=False, markup=False)
        if refused == len(sources):
            raise UserError("no model can be served; see the reasons above")
        status.update("waiting for the instances")
        proxies.start()
        try:
            async with asyncio.timeout(_START_S):
                while not market.desk.is_ready()[0]:
                    if not market.desk.is_healthy()[0]:
                        raise UserError(f"a part of the server {market.desk.is_healthy()[1]}")
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise UserError(f"after {_START_S:.0f} s still {market.desk.is_ready()[1]}; see the log above") from None


def _announce(console: Console, market: LiveMarket, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    models: list[LiveModel] = list(market.desk.models().values())
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
