"""The two that are compared: each a proxy in a process of its own, before a backend that answers at once."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from aegis.config.config import Config
from aegis.core.clock import NS_PER_S
from aegis.core.errors import UserError
from aegis.core.ids import ProxyId
from aegis.device.performance import figures
from aegis.launcher.live_market import log_settings
from aegis.metadata.store import StoreSettings, open_store
from bench.lab.proxy.backend import BackendSettings
from bench.lab.proxy.child import Child, running
from bench.lab.proxy.client import Asker, Connection
from bench.lab.proxy.direct import open_direct
from bench.lab.proxy.model import AT_ONCE, AT_ONCE_MESSAGES, SILENT, VECTORS, spec, write_text
from bench.lab.proxy.routes import ROUTES
from proxy.live.serving import http_settings
from proxy.live.settings import ProxySettings

_HOST = "127.0.0.1"
_NUMBER = ProxyId(1)
_MODELS = AT_ONCE, AT_ONCE_MESSAGES, VECTORS
_LOOK_S = 120.0
_LITELLM = "from litellm.proxy.proxy_cli import run_server; run_server()"
_LITELLM_ENVIRONMENT = {
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",  # for clients without a key
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # nothing is fetched
    "LITELLM_LOG": "ERROR",
    "LITELLM_MODE": "PRODUCTION",
}


@dataclass(frozen=True, slots=True)
class Side:
    """The proxy is the process `pid` and listens at `port`; `direct` asks its backend without it."""

    name: str
    port: int
    pid: int
    direct: Asker


@asynccontextmanager
async def aegis_side(core: int) -> AsyncIterator[Side]:
    """A proxy of aegis as `aegis launch` starts further ones by default, with a Redis that requests are recorded in.
    Raises UserError."""
    config = Config()
    with tempfile.TemporaryDirectory(prefix="aegis-") as name:
        directory, port = Path(name), _free_port()
        write_text(directory)
        node = f"ipc://{directory}/proxies"
        backend = BackendSettings(node, tuple(spec(model, directory) for model in (*_MODELS, SILENT)))
        async with open_store(config.redis) as store:
            settings = _settings(config, node, f"ipc://{directory}/proxy", port, store.settings)
            command = [sys.executable, "-m", "proxy.live.process", settings.name]
            with running(
                [sys.executable, "-m", "bench.lab.proxy.backend"], told=msgspec.json.encode(backend)
            ) as instance:
                await asyncio.to_thread(instance.line)
                with running(command, told=msgspec.json.encode(settings), core=core) as proxy:
                    await _up(proxy, port, "/v1/models")
                    async with open_direct(node, directory) as direct:
                        yield Side("aegis", port, proxy.pid, direct)


@asynccontextmanager
async def litellm_side(python: Path, core: int) -> AsyncIterator[Side]:
    """LiteLLM's proxy with a model for each provider, one worker, no keys and no database; `python` is the interpreter
    that has it. Raises UserError."""
    with tempfile.TemporaryDirectory(prefix="aegis-") as name:
        file, port = Path(name) / "config.yaml", _free_port()
        with running([sys.executable, "-m", "bench.lab.proxy.upstream"]) as upstream:
            upstream_port = int(await asyncio.to_thread(upstream.line))
            file.write_bytes(msgspec.json.encode(_litellm_config(upstream_port)))  # JSON is YAML
            options = ["--config", str(file), "--host", _HOST, "--port", str(port), "--num_workers", "1"]
            command = [str(python), "-c", _LITELLM, *options]
            with running(command, core=core, environment=_LITELLM_ENVIRONMENT) as proxy:
                await _up(proxy, port, "/health/liveliness")
                direct = await Connection.open(upstream_port)
                yield Side("LiteLLM", port, proxy.pid, direct)
                direct.close()


def litellm_version(python: Path) -> str:
    """Raises UserError if the interpreter has none."""
    asked = "import litellm.proxy.proxy_cli; from importlib.metadata import version; print(version('litellm'))"
    try:
        done = subprocess.run([python, "-c", asked], capture_output=True, text=True, timeout=_LOOK_S, check=True)
    except (OSError, subprocess.SubprocessError):
        message = f"--litellm {python}: no Python that has litellm[proxy]; docs/benchmarking.md says how to get one"
        raise UserError(message, param="litellm") from None
    return done.stdout.split()[-1]


def _settings(config: Config, node: str, address: str, port: int, store: StoreSettings) -> ProxySettings:
    """The settings that `aegis launch` gives a further proxy."""
    scheduling, kept = config.scheduling, config.telemetry
    return ProxySettings(
        policy=scheduling.policy,
        memory_bytes=config.memory.device,
        max_group_size=scheduling.prefill.max_group_size,
        q_max_ns=round(scheduling.decode.q_max_s * NS_PER_S),
        switching_share=scheduling.decode.switching_share,
        hardware=figures("cpu"),
        explains=kept.decisions > 0,
        reuses=config.memory.prefix_reuse == "on",
        name="proxy-1",
        number=_NUMBER,
        node_address=node,
        address=address,
        keys=None,
        host=_HOST,
        port=port,
        logs=log_settings(config),
        http=http_settings(config),
        refuses_late=config.server.refuse_late,
        records=kept.records,
        decisions=kept.decisions,
        token_times=kept.token_times,
        otlp=kept.otlp,
        store=store,
    )


def _litellm_config(upstream_port: int) -> dict[str, object]:
    """Each route is sent on as it came, which costs LiteLLM least."""
    bases = {"openai": f"http://{_HOST}:{upstream_port}/v1", "anthropic": f"http://{_HOST}:{upstream_port}"}
    providers = {route.model: route.provider for route in ROUTES.values()}
    models = [
        {
            "model_name": model,
            "litellm_params": {"model": f"{provider}/{model}", "api_base": bases[provider], "api_key": "none"},
        }
        for model, provider in providers.items()
    ]
    return {"model_list": models}


async def _up(proxy: Child, port: int, path: str) -> None:
    await asyncio.to_thread(proxy.wait_until_answers, f"http://{_HOST}:{port}{path}")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind((_HOST, 0))
        return int(listener.getsockname()[1])
