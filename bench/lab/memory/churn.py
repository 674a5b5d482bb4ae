"""Ten thousand preemptions and ten thousand balloon moves while the demo market serves, and what is left of them.

A prefill and two decode instances, processes each, share one small device. Turns are kept so short that batches are
preempted all the time, and commands move the instances' limits down and up without a pause. Every process checks all
laws of its books after every event; a broken one ends it, and restarts are counted.

Resident memory is what the processes have for themselves and of files, by their share (Pss), and once all memory that
they share: device, host KV, model cache. It is sampled from the end of a warm-up on, in which it has been touched.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

import uvloop
from msgspec import Struct

from aegis.config.config import Config
from aegis.core.errors import UserError
from aegis.core.ids import InstanceId, ModelId
from aegis.device.cpu.pool import PAGE_BYTES
from aegis.launcher.live_market import LiveMarket
from aegis.models.cache import default_cache_dir
from aegis.models.demo.market import demo_models, make_market
from aegis.models.sources import Source
from bench.common.processes import family
from bench.lab.in_process_market import Stream, draw_prompt, follow, serving, until

_MIB = 1 << 20
_DEVICE_BYTES = 192 * _MIB
_HOST_BYTES = 128 * _MIB  # KV that is kept for reuse, and history, have filled theirs after the warm-up
_LEAST_BYTES = 32 * _MIB  # no request fails for lack of room
_INSTANCES = tuple(InstanceId(name) for name in ("prefill-0", "decode-0", "decode-1"))
_SAMPLE_S = 1.0
_TIMEOUT_S = 0.3
_GROW_S = 0.002
_MOST_PAGES = 8
_WARM_SHARE = 0.25
_PROMPT_TOKENS = range(8, 121, 8)  # few lengths: what the engine keeps for each is there after the warm-up


class Churn(Struct, frozen=True):
    """`moves` are limits set below what the instance held, and lifted again when it had given that; `given_bytes` in
    all. Those `refused`, because it could not be had in time, changed nothing. What others were granted meanwhile is
    not counted. `resident_change` is from the first quarter of the samples, which begin after the warm-up, to the last
    quarter, `resident_spread` the farthest that any was from their median. When the last request has ended no block is
    left, or there is no result."""

    seconds: float
    clients: int
    requests: int
    failed: int
    preemptions: int
    switches: int
    moves: int
    refused: int
    given_bytes: int
    restarts: int
    resident_bytes: int
    resident_change: float
    resident_spread: float


class _Mover:
    """Takes from one instance again and again: lowers its limit below what it holds, and lifts it."""

    def __init__(self, market: LiveMarket, instance: InstanceId) -> None:
        self._market, self._instance = market, instance
        self.moves = self.refused = self.given_bytes = 0

    async def run(self) -> None:
        rng = Random(self._instance)
        (arbiter,) = self._market.node.devices.arbiters()
        while True:
            limit_bytes = (arbiter.held(self._instance) - rng.randint(1, _MOST_PAGES)) * PAGE_BYTES
            if limit_bytes < _LEAST_BYTES:
                await asyncio.sleep(_GROW_S)
            elif given_bytes := await self._limit(limit_bytes):
                self.moves += 1
                self.given_bytes += given_bytes
                await self._limit(_DEVICE_BYTES)

    async def _limit(self, nbytes: int) -> int:
        try:
            return await self._market.queries.limit_memory(self._instance, nbytes, timeout_s=_TIMEOUT_S)
        except UserError:
            self.refused += 1
            return 0


def churn(
    preemptions: int = 10_000, moves: int = 10_000, clients: int = 32, sources: Sequence[Source] | None = None
) -> Churn:
    """Until there have been as many of both. Serves the demo market, which is made if it is missing, or `sources`."""
    if sources is None:
        make_market()
        sources = demo_models(default_cache_dir())
    return uvloop.run(_measure(preemptions, moves, clients, sources))


async def _measure(preemptions: int, moves: int, clients: int, sources: Sequence[Source]) -> Churn:
    async with serving(_config(), sources) as market:
        start_s, samples, ended = time.monotonic(), list[int](), list[str]()
        models = [source.model for source in sources]
        movers = [_Mover(market, instance) for instance in _INSTANCES]
        work = [_client(market, models, Random(at), ended) for at in range(clients)]
        tasks = [asyncio.create_task(each) for each in (*work, *(mover.run() for mover in movers))]
        done = 0.0
        while done < 1:
            await asyncio.sleep(_SAMPLE_S)
            moved = sum(mover.moves for mover in movers) / moves
            done = min(_sum(market, "aegis:instance_preemptions_total") / preemptions, moved)
            if done >= _WARM_SHARE:
                samples.append(await asyncio.to_thread(resident_bytes))
        seconds = time.monotonic() - start_s
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: not _left(market))
        for arbiter in market.node.devices.arbiters():
            arbiter.check()
        return _result(market, seconds, clients, ended, movers, samples)


def _result(
    market: LiveMarket,
    seconds: float,
    clients: int,
    ended: Sequence[str],
    movers: Sequence[_Mover],
    samples: Sequence[int],
) -> Churn:
    resident, change, spread = _flat(samples)
    return Churn(
        seconds=seconds,
        clients=clients,
        requests=len(ended),
        failed=sum(map(bool, ended)),
        preemptions=_sum(market, "aegis:instance_preemptions_total"),
        switches=_sum(market, "aegis:instance_switches_total"),
        moves=sum(mover.moves for mover in movers),
        refused=sum(mover.refused for mover in movers),
        given_bytes=sum(mover.given_bytes for mover in movers),
        restarts=_sum(market, "aegis:instance_restarts_total"),
        resident_bytes=resident,
        resident_change=change,
        resident_spread=spread,
    )


def _config() -> Config:
    return Config.model_validate(
        {
            "instances": {"prefill": 1, "decode": 2},
            "memory": {"device": _DEVICE_BYTES, "host": _HOST_BYTES, "model_cache": 64 * _MIB, "debug": True},
            "telemetry": {"spans": 5_000, "records": 500},
            "scheduling": {"policy": "aegaeon", "decode": {"q_max_s": 0.05}},
        }
    )


async def _client(market: LiveMarket, models: Sequence[ModelId], rng: Random, ended: list[str]) -> None:
    """One request after the other; notes how each failed, or nothing."""
    while True:
        model = rng.choice(models)
        prompt = draw_prompt(market, model, rng, rng.choice(_PROMPT_TOKENS))
        ended.append((await follow(market, model, prompt, rng.randint(16, 120), Stream())).failure)


def _sum(market: LiveMarket, metric: str) -> int:
    """Over all instances, as they last reported."""
    values = (market.node.metrics.registry.get_sample_value(metric, {"instance": instance}) for instance in _INSTANCES)
    return round(sum(value or 0 for value in values))


def _left(market: LiveMarket) -> int:
    """Blocks that hold something."""
    names = [
        f"{region}_blocks_{state}" for region in ("device", "host") for state in ("used", "reserved", "in_transfer")
    ]
    return sum(_sum(market, f"aegis:memory_{name}") for name in names)


def resident_bytes() -> int:
    """The resident bytes of this process and all below it."""
    return sum(map(own_bytes, family(os.getpid()))) + _shared_bytes()


def own_bytes(pid: int) -> int:
    """What a process has for itself, and of files; 0 of one that has ended, as one does whose books are broken."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except (FileNotFoundError, ProcessLookupError):
        return 0
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    return (kib["Pss_Anon"] + kib["Pss_File"]) << 10


def _shared_bytes() -> int:
    """The bytes that this process, which owns all of it, has in files in memory."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if "/memfd:aegis-" in str(entry.readlink()):
                status = entry.stat()
                found[status.st_ino] = status.st_blocks * 512
        except FileNotFoundError:
            continue
    return sum(found.values())


def _flat(samples: Sequence[int]) -> tuple[int, float, float]:
    """The median, the change from the first to the last quarter, and the farthest from the median."""
    middle, quarter = statistics.median(samples), max(len(samples) // 4, 1)
    first, last = statistics.median(samples[:quarter]), statistics.median(samples[-quarter:])
    return round(middle), last / first - 1, max(abs(sample / middle - 1) for sample in samples)
