"""A server watched while others load it: how soon it answers `/health` and `/metrics`, how soon a request is gone whose
client left, and how much memory its processes hold.

Times are those of this process, which shares the machine with all others.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from msgspec import Struct

from aegis.core.errors import UserError
from aegis.telemetry.files import parse
from aegis.telemetry.records import Record
from bench.common.percentiles import percentile_of
from bench.common.processes import family

_HEALTH_S = 0.05
_METRICS_S = 0.25
_CANCEL_S = 0.5
_LEAVES_S = 0.3
_LOOK_S = 0.005
_MEMORY_S = 5.0  # it goes through the page tables of all processes, which takes the more time the more KV there is
_NEXT = "Aegis-Next"


class Waits(Struct, frozen=True, kw_only=True):
    """How long something took, each time."""

    times: int
    p50_ms: float
    p99_ms: float
    longest_ms: float


def waits(seconds: Sequence[float]) -> Waits:
    found_ms = [1e3 * each for each in seconds]
    return Waits(
        times=len(found_ms),
        p50_ms=percentile_of(found_ms, 50),
        p99_ms=percentile_of(found_ms, 99),
        longest_ms=max(found_ms, default=0.0),
    )


@dataclass(slots=True)
class Watched:
    health_s: list[float] = field(default_factory=list)
    metrics_s: list[float] = field(default_factory=list)
    cancels_s: list[float] = field(default_factory=list)
    memory: list[Held] = field(default_factory=list)


class Held(Struct, frozen=True):
    """The memory of all processes of a server. What is `shared`, weights, KV and device memory, is bounded by options;
    the rest is `own`. Each page counts once, in equal parts of those who share it."""

    own: int
    shared: int


def memory_of(root: int) -> Held:
    """The memory of a process and of all below it."""
    parts = [_parts(pid) for pid in family(root)]
    return Held(sum(own for own, _ in parts), sum(shared for _, shared in parts))


def _parts(pid: int) -> tuple[int, int]:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0, 0
    kib = {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines[1:])}
    return (kib["Pss"] - kib["Pss_Shmem"]) << 10, kib["Pss_Shmem"] << 10


@asynccontextmanager
async def watching(
    session: aiohttp.ClientSession, url: str, root: int, models: Sequence[str]
) -> AsyncIterator[Watched]:
    """What is seen while the block is, of the server whose launcher is `root`. Raises UserError where it does not
    answer."""
    watched = Watched()
    probes = [
        asyncio.create_task(_every(_HEALTH_S, lambda: _get(session, f"{url}/health", watched.health_s))),
        asyncio.create_task(_every(_METRICS_S, lambda: _get(session, f"{url}/metrics", watched.metrics_s))),
        asyncio.create_task(_cancels(session, url, models, watched.cancels_s)),
        asyncio.create_task(_every(_MEMORY_S, lambda: _weigh(root, watched.memory))),
    ]
    try:
        yield watched
    finally:
        for probe in probes:
            probe.cancel()
        ends = await asyncio.gather(*probes, return_exceptions=True)
    for end in ends:
        if isinstance(end, aiohttp.ClientError | TimeoutError):
            raise UserError(f"{url} does not answer under load ({str(end) or type(end).__name__})")
        if not isinstance(end, asyncio.CancelledError) and isinstance(end, BaseException):
            raise end


async def _every(period_s: float, look: Callable[[], Awaitable[None]]) -> None:
    """One look at a time; a look that takes longer than the period delays the next one."""
    while True:
        began_s = time.monotonic()
        await look()
        await asyncio.sleep(max(began_s + period_s - time.monotonic(), 0.0))


async def _get(session: aiohttp.ClientSession, url: str, took_s: list[float]) -> None:
    began_s = time.monotonic()
    async with session.get(url) as reply:
        await reply.read()
        reply.raise_for_status()
    took_s.append(time.monotonic() - began_s)


async def _weigh(root: int, memory: list[Held]) -> None:
    memory.append(await asyncio.to_thread(memory_of, root))


async def _cancels(session: aiohttp.ClientSession, url: str, models: Sequence[str], gone_s: list[float]) -> None:
    at = 0
    while True:
        taken_s = await _cancel(session, url, models[at % len(models)])
        if taken_s is not None:
            gone_s.append(taken_s)
        at += 1
        await asyncio.sleep(_CANCEL_S)


async def _cancel(session: aiohttp.ClientSession, url: str, model: str) -> float | None:
    """From when the client closes its connection until the request is recorded as ended: what it held is freed by then.
    None if the request was refused, or had ended before."""
    body = {"model": model, "prompt": "Once", "max_tokens": 400, "stream": True, "ignore_eos": True}
    following = await _next_record(session, url)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as own:
        async with own.post(f"{url}/v1/completions", json=body) as reply:
            if reply.status != 200:
                return None
            await asyncio.sleep(_LEAVES_S)
            if reply.content.at_eof():
                return None
            left_s = time.monotonic()
            reply.close()
        while True:
            records, following = await _records(session, url, following)
            if any(each.ended == "cancelled" for each in records):
                return time.monotonic() - left_s
            await asyncio.sleep(_LOOK_S)


async def _next_record(session: aiohttp.ClientSession, url: str) -> int:
    return (await _records(session, url, 10**17))[1]


async def _records(session: aiohttp.ClientSession, url: str, since: int) -> tuple[list[Record], int]:
    async with session.get(f"{url}/debug/records", params={"since": str(since)}) as reply:
        return parse(await reply.read(), Record, "/debug/records"), int(reply.headers[_NEXT])
