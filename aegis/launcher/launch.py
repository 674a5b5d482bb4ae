"""`aegis launch`: instances, registration, HTTP, and their orderly end."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import uvloop
from rich.console import Console

from aegis.admin_client import API_KEY
from aegis.cluster.ray_cluster import refuse_without_ray
from aegis.config.config import Config
from aegis.config.keyring import read_keyring
from aegis.config.sizes import format_size
from aegis.config.variables import mistyped
from aegis.core.api_keys import Keyring
from aegis.core.errors import ModelRefused, UserError
from aegis.core.ids import ProxyId
from aegis.core.role import Role
from aegis.core.wording import count
from aegis.engine.vllm import version
from aegis.launcher.config_watch import ConfigWatch
from aegis.launcher.configured_models import sources_of
from aegis.launcher.demo_making import make_first_models, make_other_models, missing_of
from aegis.launcher.live_market import LiveMarket, log_settings, open_market
from aegis.launcher.proxy_supervisor import ProxySupervisor, open_proxies
from aegis.launcher.services import Services, open_services
from aegis.launcher.visible_devices import counts_ignored, crowded, dealt, on_this_machine, with_gpus
from aegis.models.architectures import architectures_of
from aegis.models.sources import Source
from aegis.node.catalogue.model import CatalogueModel
from aegis.node.sizing import host_slabs_of, instances_of, slab_shortage
from aegis.policies import RECIPES, recipe
from aegis.process import garbage_collection
from aegis.process.forced_exit import killed_after_signal, on_signals
from aegis.process.memory_limit import memory_limit
from aegis.process.open_files import allow_many_open_files
from aegis.process.tasks import cancelled
from aegis.telemetry import logs
from aegis.telemetry.tracing import traced
from proxy.http.market import Served
from proxy.http.openai.models import note_of
from proxy.http.settings import Settings
from proxy.live.certificate import Certificate
from proxy.live.listening import listen
from proxy.live.serving import CLOSE_S, acceptors, drained, http_server, http_settings, running
from proxy.live.settings import ProxySettings

_START_S = 120.0
_LAST_S, _LAST_WITH_RAY_S = 15.0, 30.0  # for all of an orderly end but the drain and the replies
_logger = logging.getLogger(__name__)


Reading = tuple[Path, Callable[[], Config]]
"""The file that the configuration is from, and how it is read again."""


def main(config: Config, reading: Reading | None = None) -> int:
    """Serves until SIGINT or SIGTERM; with a `reading` the file is watched. Returns the exit code; raises UserError for
    what the user can mend."""
    logs.guard_streams(log_settings(config))
    logs.setup(log_settings(config))
    allow_many_open_files()
    config, gpus = on_this_machine(config)
    if reading:
        file, read = reading
        reading = file, lambda: with_gpus(read(), gpus)
    keys, http = read_keyring(config), http_settings(config)
    listener = listen(config.server.host, config.server.port, shared=config.server.proxies > 1)
    refuse_unlaunchable(config)
    processors = len(os.sched_getaffinity(0))
    for line in (dealt(config, gpus), counts_ignored(config), crowded(config, processors), *mistyped(os.environ)):
        if line:
            sys.stderr.write(f"aegis: {line}\n")
    sources = sources_of(config, demo=config.serves_demo)
    return uvloop.run(_to_the_end(_serve(config, reading, keys, http, listener, sources)))


def refuse_unlaunchable(config: Config) -> None:
    """Raises UserError for what cannot run on this machine, before anything is started."""
    _check_sizes(config)
    _refuse_without_engine(config)
    if config.ray.address:
        refuse_without_ray()
    _refuse_to_change_mixed(config)
    _refuse_to_migrate(config)
    if tls := http_settings(config).tls:
        Certificate(tls)


async def _to_the_end(serving: Awaitable[int]) -> int:
    """Then ends the process, unless the user is to mend something: a thread may still be busy with what a client sent,
    and nothing that it does matters any more."""
    try:
        code = await serving
    except UserError:
        raise
    except Exception:  # noqa: BLE001 - a bug of ours: what it left running is not waited for
        logs.log(_logger, logging.ERROR, "ended by a bug", {}, exc_info=True)
        code = 1
    logs.finish()
    os._exit(code)


async def _serve(
    config: Config,
    reading: Reading | None,
    keys: Keyring,
    http: Settings,
    listener: socket.socket,
    sources: list[Source],
) -> int:
    stop = asyncio.Event()
    drain_s = config.server.shutdown_timeout_s
    last_s = _LAST_WITH_RAY_S if config.ray.address else _LAST_S
    console = Console(stderr=True, soft_wrap=True)
    async with AsyncExitStack() as stack:
        shell = stack.enter_context(killed_after_signal(drain_s + CLOSE_S + last_s))
        on_signals(stop.set, shell)
        services = await stack.enter_async_context(open_services(config))
        if config.serves_demo and not await _made_first(stop):
            return 130
        later = missing_of(sources) if config.serves_demo else []
        sources = [source for source in sources if source not in later]
        stages = stack.enter_context(traced(config.telemetry.otlp, "proxy-0"))
        architectures = await asyncio.to_thread(architectures_of, sources)
        opening = open_market(config, services, stages=stages, architectures=architectures)
        market = await stack.enter_async_context(opening)
        on_signals(stop.set, shell)  # again, for Ray handles them in its own way from its start on
        market.node.keys = keys
        template = _proxy_template(config, http, market, services, listener)
        proxies = await stack.enter_async_context(
            open_proxies(config.server.proxies - 1, template, market, services.store, drain_s=drain_s + CLOSE_S)
        )
        started = asyncio.create_task(_bring_up(market, proxies, sources, console, stop))
        if not await _first(started, stop):
            await _broken_off(started)  # before the registrar, whose end would be told as a refusal
            return 130
        server = http_server(market.proxy, listener, services.store, http)
        serving = asyncio.create_task(server.serve(acceptors(listener)))
        garbage_collection.collect_seldom()
        collecting = garbage_collection.collect_when_idle(lambda: market.proxy.busy)
        await stack.enter_async_context(running(collecting))
        if reading:
            watch = ConfigWatch(*reading, config, market.node)
            await stack.enter_async_context(running(watch.run()))
        _announce(console, market, listener, later, tls=http.tls is not None)
        if later:
            await stack.enter_async_context(running(make_other_models(later, market.node.catalogue)))
        await _first(serving, stop)
        stop.clear()
        market.node.drain(drain_s)
        await drained(market.proxy, stop, within_s=drain_s)  # requests that come meanwhile are answered 503
        server.should_exit = True
        if stop.is_set():
            market.node.drain(0)
        await serving
    console.print("aegis has stopped")
    return 0


def _proxy_template(
    config: Config, http: Settings, market: LiveMarket, services: Services, listener: socket.socket
) -> ProxySettings:
    """The settings that all further proxies share."""
    return ProxySettings(
        **market.scheduling.shared(),
        name="",
        number=ProxyId(0),
        node_address=f"ipc://{services.directory}/proxies",
        address="",
        keys=market.wires.keys,
        host=config.server.host,
        port=listener.getsockname()[1],
        logs=log_settings(config),
        http=http,
        refuses_late=config.server.refuse_late,
        records=config.telemetry.records,
        decisions=config.telemetry.decisions,
        token_times=config.telemetry.token_times,
        otlp=config.telemetry.otlp,
        store=services.store.settings if services.store else None,
    )


async def _first(task: asyncio.Task[None], stop: asyncio.Event) -> bool:
    """Whether the task ended before the stop; otherwise it goes on, if the signal has not ended it, too. Raises what
    the task raised."""
    waiting = asyncio.create_task(stop.wait())
    await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if stop.is_set():
        return False
    task.result()
    return True


async def _broken_off(task: asyncio.Task[None]) -> None:
    await cancelled(task)
    if not task.cancelled():
        task.exception()  # it failed just now


async def _made_first(stop: asyncio.Event) -> bool:
    """Whether the first models of the demo market are there; at the stop their making ends. Raises UserError."""
    making = asyncio.create_task(make_first_models())
    if await _first(making, stop):
        return True
    await _broken_off(making)
    return False


def _check_sizes(config: Config) -> None:
    """Memory that the machine does not have, or no device, is refused before anything is started."""
    limit = memory_limit()
    sizes = {"--host-memory": config.memory.host}
    if config.device == "cpu" and not config.ray.address:
        sizes["--device-memory"] = config.memory.device * config.device_count * config.instances.tensor_parallel_size
    for option, size in sizes.items():
        if size > limit.nbytes:
            whose = "this container may have" if limit.contained else "this machine has"
            raise UserError(f"{option} {format_size(size)} is more than {whose} ({limit.nbytes / (1 << 30):.3g}GiB)")
    floor, device = config.memory.floor, config.memory.device
    if "floor" in config.memory.model_fields_set and floor > device:  # that of a GPU is known here only
        raise UserError(
            f"memory.floor {format_size(floor)} is more than --device-memory {format_size(device)}: idle instances "
            f"would keep all; give {format_size(device)} at most"
        )
    if shortage := slab_shortage(host_slabs_of(config), len(instances_of(config))):
        raise UserError(shortage)


def _refuse_without_engine(config: Config) -> None:
    """Raises UserError; a model that asks for an engine of its own is refused alone."""
    if config.engine == "vllm" and (reason := version.refusal()):
        raise UserError(reason, param="engine")


def _refuse_to_change_mixed(config: Config) -> None:
    """Raises UserError."""
    if config.instances.change_roles and Role.MIXED in instances_of(config).values():
        raise UserError(
            "--change-roles is for prefill and decode instances: say how many with --prefill and --decode, or give "
            "--roles fixed",
            param="change_roles",
        )


def _refuse_to_migrate(config: Config) -> None:
    """Raises UserError."""
    if config.scheduling.migrates and recipe(config.scheduling.policy).placement is None:
        known = ", ".join(name for name, each in RECIPES.items() if each.placement)
        raise UserError(
            f"policy {config.scheduling.policy!r} does not move models: leave out --migrate, or take {known}",
            param="migrate",
        )


async def _bring_up(
    market: LiveMarket, proxies: ProxySupervisor, sources: list[Source], console: Console, stop: asyncio.Event
) -> None:
    """Registers everything and waits for the instances and proxies; at least one model has to be served. Ctrl-C ends
    the registrar, too, and it has refused nothing then."""
    refused = 0
    with console.status("starting") as status:
        report = lambda model, text: status.update(f"{model}: {text}")  # noqa: E731
        async for source, outcome in market.node.catalogue.register(sources, report):
            if isinstance(outcome, ModelRefused):
                refused += 1
                if stop.is_set():
                    continue
                console.print(f"refused {source.model}: {outcome.message}", highlight=False, markup=False)
        if refused == len(sources):
            raise UserError("no model can be served; see the reasons above")
        status.update("waiting for the instances")
        proxies.start()
        try:
            async with asyncio.timeout(_START_S):
                while not market.queries.is_ready()[0]:
                    if not market.queries.is_healthy()[0]:
                        raise UserError(f"a part of the server {market.queries.is_healthy()[1]}")
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise UserError(f"after {_START_S:.0f} s still {market.queries.is_ready()[1]}; see the log above") from None


def _announce(
    console: Console, market: LiveMarket, listener: socket.socket, later: Sequence[Source], *, tls: bool
) -> None:
    host, port = listener.getsockname()[:2]
    scheme = "https" if tls else "http"
    url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
    served: list[CatalogueModel] = list(market.queries.models().values())
    lazy = [name for name, each in market.node.catalogue.coming().items() if each.lazy]
    out = Console(highlight=False, soft_wrap=True)
    out.print(f"aegis serves {count(len(served) + len(lazy), 'model')} on {url}")
    for model in served:
        manifest = model.spec.manifest
        size = f"{manifest.image_bytes / (1 << 20):8.1f} MiB"
        out.print(f"  {model.spec.model:24} {manifest.architecture:24} {size} {note_of(model)}".rstrip())
    for name in lazy:
        out.print(f"  {name:24} its weights come with its first request")
    if later:
        out.print(f"being made, while their requests wait: {', '.join(source.model for source in later)}")
    for name, prompt in _to_try(served, lazy)[:1]:
        out.print("try it:")
        out.print(f"  {_example(url, name, prompt, needs_key=market.node.keys.asks)}", markup=False)
    out.print("Ctrl-C stops everything.")
    sys.stdout.flush()


def _to_try(served: Sequence[Served], lazy: Sequence[str]) -> list[tuple[str, str | list[int]]]:
    """The models that an example may ask, those that are known to take text first, and what it asks."""
    story, tokens = "Tell me a story.", [1]
    generating = [model for model in served if model.spec.manifest.pooling is None]
    with_text = [model.spec.model for model in generating if model.text]
    without = [model.spec.model for model in generating if not model.text]
    return [*((name, story) for name in [*with_text, *lazy]), *((name, tokens) for name in without)]


def _example(url: str, model: str, prompt: str | list[int], *, needs_key: bool) -> str:
    """A request, for a shell; the key is the user's to have in a variable, and in no terminal's history."""
    body = {"model": model, "prompt": prompt, "max_tokens": 64, "temperature": 0, "stream": True}
    key = f' -H "Authorization: Bearer ${API_KEY}"' if needs_key else ""
    return f"curl -N {url}/v1/completions{key} -H 'Content-Type: application/json' -d '{json.dumps(body)}'"
