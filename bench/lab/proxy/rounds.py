"""The measurements of one proxy: the latency that it adds to single requests, its throughput, the cost of idle
streams."""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from msgspec import Struct

from aegis.core.clock import NS_PER_MS
from aegis.core.errors import UserError
from bench.common.percentiles import percentile_of
from bench.common.processes import cpu_s, resident_bytes
from bench.lab.proxy.client import Asker, Connection, Took
from bench.lab.proxy.model import SILENT, VECTOR
from bench.lab.proxy.routes import CHAT, Route
from bench.lab.proxy.sides import Side

SHORT_TOKENS = 16
LONG_TOKENS = 128
_OPENING = 100  # streams that are being opened at a time


class Plan(Struct, frozen=True):
    """The amount of measurements."""

    rounds: int = 5
    asks: int = 300  # one after the other, for a latency
    seconds: float = 2.0  # for a rate
    concurrency: int = 32
    idle_streams: int = 2000
    idle_rounds: int = 4  # in which the two proxies hold the streams in turn
    idle_pairs: int = 10  # of latencies, in each
    idle_asks: int = 100


class Latency(Struct, frozen=True):
    """The latency of one request after the other. The added part is over the median of asking the backend itself."""

    direct_ms: float
    added_p50_ms: float
    added_p99_ms: float
    added_first_ms: float  # before the first token; that of an answer in one piece is its end
    processor_ms: float = 0.0  # of the proxy, for each


class Rate(Struct, frozen=True):
    """The rate of many at a time, and the part of a core that the proxy used."""

    per_s: float
    busy: float


class Round(Struct, frozen=True):
    """Answers in one piece and streams, of `SHORT_TOKENS`; the tokens are those of streams of `LONG_TOKENS`."""

    whole: Latency
    stream: Latency
    requests: Rate
    tokens: Rate


class Idle(Struct, frozen=True):
    """The growth of each proxy when it held the streams for the first time, and latencies in pairs: of the one that
    held none, of the one that held them."""

    streams: int
    grown_bytes: tuple[int, ...]
    without: tuple[Latency, ...]
    beside: tuple[Latency, ...]


async def warm_up(side: Side, asks: int, route: Route = CHAT) -> None:
    """The first requests of a process are not measured. Raises UserError if an answer is not as expected."""
    connection = await Connection.open(side.port, route)
    expected = SHORT_TOKENS if route.streams else len(VECTOR)
    for stream in (False, True) if route.streams else (False,):
        content = route.body(tokens=SHORT_TOKENS, stream=stream)
        await _ask(side.direct, content, asks)
        await _ask(connection, content, asks)
        if connection.length() != expected:
            raise UserError(f"{side.name}, {route.path}: {connection.length()}, not {expected}: {connection.reply!r}")
    connection.close()


async def measure(side: Side, plan: Plan) -> Round:
    """Raises UserError if an answer is none."""
    return Round(
        whole=await latency(side, plan.asks, stream=False),
        stream=await latency(side, plan.asks, stream=True),
        requests=await _rate(side, plan, tokens=SHORT_TOKENS, stream=False, each=1),
        tokens=await _rate(side, plan, tokens=LONG_TOKENS, stream=True, each=LONG_TOKENS),
    )


async def measure_idle(sides: tuple[Side, Side], plan: Plan) -> Idle:
    """Two equal proxies, of which one holds the streams. A latency takes half a second and the next is the other's,
    because a machine's pace changes within seconds by more than the streams cost. The proxy that is not measured is
    stopped, so that its comments into the streams do not come in between. Raises UserError if a stream does not
    begin."""
    grown, without, beside = list[int](), list[Latency](), list[Latency]()
    for turn in range(plan.idle_rounds):
        holder, free = sides if turn % 2 == 0 else reversed(sides)
        before = resident_bytes(holder.pid)
        streams = await _open_idle(holder, plan.idle_streams)
        if turn < len(sides):
            grown.append(resident_bytes(holder.pid) - before)
        for pair in range(plan.idle_pairs):
            order = ((free, holder, without), (holder, free, beside))
            for side, other, latencies in order if pair % 2 else reversed(order):
                with _stopped(other.pid):
                    latencies.append(await latency(side, plan.idle_asks, stream=False))
        for stream in streams:
            stream.close()
        await _rest(holder)
    return Idle(plan.idle_streams, tuple(grown), tuple(without), tuple(beside))


@contextmanager
def _stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def latency(side: Side, asks: int, *, stream: bool, route: Route = CHAT) -> Latency:
    """Raises UserError if an answer is none."""
    content = route.body(tokens=SHORT_TOKENS, stream=stream)
    connection = await Connection.open(side.port, route)
    direct, used_s = await _ask(side.direct, content, asks), cpu_s(side.pid)
    through = await _ask(connection, content, asks)
    used_s = cpu_s(side.pid) - used_s
    connection.close()
    base_ns = statistics.median(took.total_ns for took in direct)
    first_ns = statistics.median(t.first_ns for t in through) - statistics.median(d.first_ns for d in direct)
    totals_ns = [took.total_ns for took in through]
    return Latency(
        direct_ms=base_ns / NS_PER_MS,
        added_p50_ms=(statistics.median(totals_ns) - base_ns) / NS_PER_MS,
        added_p99_ms=(percentile_of(totals_ns, 99) - base_ns) / NS_PER_MS,
        added_first_ms=first_ns / NS_PER_MS,
        processor_ms=1e3 * used_s / asks,
    )


async def _ask(asker: Asker, content: bytes, asks: int) -> list[Took]:
    return [await asker.ask(content) for _ in range(asks)]


async def _rate(side: Side, plan: Plan, *, tokens: int, stream: bool, each: int) -> Rate:
    """Every client asks again as soon as it was answered; `each` is what an answer counts."""
    content = CHAT.body(tokens=tokens, stream=stream)
    connections = [await Connection.open(side.port) for _ in range(plan.concurrency)]
    used_s, began_s = cpu_s(side.pid), time.monotonic()
    done = sum(await asyncio.gather(*[_ask_until(c, content, began_s + plan.seconds) for c in connections]))
    took_s, used_s = time.monotonic() - began_s, cpu_s(side.pid) - used_s
    for connection in connections:
        connection.close()
    return Rate(done * each / took_s, used_s / took_s)


async def _ask_until(connection: Connection, content: bytes, end_s: float) -> int:
    done = 0
    while time.monotonic() < end_s:
        await connection.ask(content)
        done += 1
    return done


async def _open_idle(side: Side, streams: int) -> Sequence[Connection]:
    """Streams that have begun and have no token yet."""
    content = CHAT.body(model=SILENT, tokens=SHORT_TOKENS, stream=True)
    opened = list[Connection]()
    while len(opened) < streams:
        part = [await Connection.open(side.port) for _ in range(min(_OPENING, streams - len(opened)))]
        for connection in part:
            connection.send(content)
        for connection in part:
            await connection.begun()
        opened += part
    await _rest(side)
    return opened


async def _rest(side: Side) -> None:
    """Until the proxy has nothing left to do."""
    while True:
        used_s = cpu_s(side.pid)
        await asyncio.sleep(0.25)
        if cpu_s(side.pid) - used_s <= 0.05:
            return
