"""Two instances whose loads peak in turn, on one device of M bytes, on two of M each, and on two of M / 2 each.

All clients ask for the model of the one instance, then all for that of the other, several rounds. Their KV takes nearly
all of M. All the markets are up at the same time and take turns at serving the same load, so that a machine whose speed
drifts does not spoil the ratios; throughput is tokens over the time of a round, moving memory included.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random

import uvloop
from msgspec import Struct

from aegis.config.config import Config
from aegis.core.ids import InstanceId, ModelId
from aegis.launcher.live_market import LiveMarket
from aegis.models.sources import Source
from bench.lab.in_process_market import Stream, draw_prompt, follow, serving, write_llama

_MIB = 1 << 20
_PREFILL, _LEFT, _RIGHT = (InstanceId(name) for name in ("prefill-0", "decode-0", "decode-1"))
_ASSIGNED = {ModelId("left"): _LEFT, ModelId("right"): _RIGHT}
_PROMPT_TOKENS, _OUTPUT_TOKENS = 160, 64
_REQUESTS = 2  # of each client, one after the other, at each peak
_SAMPLE_S = 0.05
_TIMEOUT_S = 300.0


class Arm(Struct, frozen=True):
    """`devices` of `device_bytes` for the two decode instances; `ratio` is to two devices of M each, the median over
    the rounds. `peak` is the most an instance held, as a share of its device."""

    devices: int
    device_bytes: int
    tokens_per_s: float
    ratio: float
    peak: float
    failed: int


class Sharing(Struct, frozen=True):
    """The results of the same load. `device_bytes` is M."""

    device_bytes: int
    clients: int
    rounds: int
    shared: Arm
    apart: Arm
    halves: Arm


class _Running:
    """A market, and what was seen of it."""

    def __init__(self, market: LiveMarket, devices: int, device_bytes: int) -> None:
        self._market = market
        self.devices, self.device_bytes = devices, device_bytes
        self.rates: list[float] = []
        self.failed = 0
        self._peak = 0

    async def play(self, clients: int, *, counted: bool = True) -> None:
        """Both peaks."""
        start_s, tokens = time.monotonic(), 0
        watching = asyncio.create_task(self._watch())
        for model in _ASSIGNED:
            async with asyncio.timeout(_TIMEOUT_S):
                served = await asyncio.gather(*(self._ask(model, Random(at)) for at in range(clients)))
            tokens += sum(sum(counts) for counts in served)
            self.failed += sum(count < _OUTPUT_TOKENS for counts in served for count in counts)
        watching.cancel()
        if counted:
            self.rates.append(tokens / (time.monotonic() - start_s))

    async def _ask(self, model: ModelId, rng: Random) -> list[int]:
        """One client; how many tokens each of its requests got."""
        counts = []
        for _ in range(_REQUESTS):
            prompt = draw_prompt(self._market, model, rng, _PROMPT_TOKENS)
            stream = await follow(self._market, model, prompt, _OUTPUT_TOKENS, Stream())
            counts.append(len(stream.tokens_ns))
        return counts

    async def _watch(self) -> None:
        while True:
            for arbiter in self._market.node.devices.arbiters()[1:]:
                self._peak = max(self._peak, *(use.held for use in arbiter.use().values()))
            await asyncio.sleep(_SAMPLE_S)

    def arm(self, beside: _Running) -> Arm:
        return Arm(
            devices=self.devices,
            device_bytes=self.device_bytes,
            tokens_per_s=statistics.median(self.rates),
            ratio=statistics.median(a / b for a, b in zip(self.rates, beside.rates, strict=True)),
            peak=self._peak * self._market.node.devices.page_bytes / self.device_bytes,
            failed=self.failed,
        )


def sharing(clients: int = 56, rounds: int = 3) -> Sharing:
    """M holds the KV of all clients' sequences and the weights, and little more."""
    with tempfile.TemporaryDirectory(prefix="aegis-bench-") as directory:
        return uvloop.run(_measure(Path(directory), clients, rounds))


def _memory_bytes(clients: int) -> int:
    """16 KiB of KV a token, blocks of 16 tokens in slabs of 2 MiB."""
    blocks = clients * (-(-(_PROMPT_TOKENS + _OUTPUT_TOKENS) // 16) + 1)
    return (-(-blocks // 8) * 2 + 24) * _MIB


async def _measure(directory: Path, clients: int, rounds: int) -> Sharing:
    checkpoint = write_llama(directory / "model", hidden=256, layers=4, heads=8, inner=512)
    m = _memory_bytes(clients)
    async with AsyncExitStack() as stack:
        arms = []
        for devices, nbytes in ((1, m), (2, m), (2, m // 2)):
            config = _config(devices, nbytes, clients)
            placement = {_PREFILL: 0, _LEFT: 1, _RIGHT: devices}
            sources = [Source(model, str(checkpoint)) for model in _ASSIGNED]
            market = serving(config, sources, assigned=_ASSIGNED, placement=placement, cache_dir=directory / "cache")
            arms.append(_Running(await stack.enter_async_context(market), devices, nbytes))
        for turn in range(rounds + 1):
            for arm in arms if turn % 2 else arms[::-1]:
                await arm.play(clients, counted=turn > 0)  # the first takes the memory from the system
        shared, apart, halves = (arm.arm(arms[1]) for arm in arms)
    return Sharing(m, clients, rounds, shared, apart, halves)


def _config(devices: int, nbytes: int, clients: int) -> Config:
    """The prefill instance has a device of its own."""
    return Config.model_validate(
        {
            "instances": {"prefill": 1, "decode": 2, "devices": devices + 1},
            "scheduling": {"policy": "aegaeon"},
            "memory": {
                "device": nbytes,
                "host": (clients * 8 + 256) * _MIB,
                "model_cache": 64 * _MIB,
                "floor": 2 << 20,
            },
        }
    )
