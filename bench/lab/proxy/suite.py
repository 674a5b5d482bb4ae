"""The cost of aegis's proxy if instances answer at once, beside LiteLLM's proxy: `aegis lab proxy`.

Each proxy is a process with a core of its own; clients and backends share the others. Both run all the time, one is
measured while the other idles, A B, B A, …, so that other work of the machine affects both alike. Figures are medians
over the rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median

import uvloop
from msgspec import Struct

from aegis.core.clock import NS_PER_MS
from bench.common import result_files
from bench.common.machine import Machine, describe
from bench.common.percentiles import percentile_of
from bench.lab.proxy.child import Cores, kept_to
from bench.lab.proxy.figures import LATENCY_RATIO_MAX, RATE_RATIO_MIN, Row, compared, show
from bench.lab.proxy.rounds import Idle, Plan, Round, measure, measure_idle, warm_up
from bench.lab.proxy.sides import aegis_side, litellm_side, litellm_version

_TRIAL = 20_000  # turns of the loop


class Pace(Struct, frozen=True):
    """The pace of a loop that is `p50_ms` long."""

    p50_ms: float
    p99_ms: float


def pace(core: int, length_ms: float, times: int) -> Pace:
    """The evenness of a core: a loop of about `length_ms`, that many times. Requests cannot be more even than that."""
    with kept_to((core,)):
        trial_ns = median(_took_ns(_TRIAL) for _ in range(9))
        turns = max(int(_TRIAL * length_ms * NS_PER_MS / trial_ns), 1)
        took_ns = [_took_ns(turns) for _ in range(times)]
    return Pace(median(took_ns) / NS_PER_MS, percentile_of(took_ns, 99) / NS_PER_MS)


def _took_ns(turns: int) -> int:
    began_ns, total = time.perf_counter_ns(), 0
    for turn in range(turns):
        total += turn
    return time.perf_counter_ns() - began_ns


IDLE_MIB_MAX = 200.0
IDLE_RATIO_MAX = 1.1
_WARM_UP = 50
_MIB = 1 << 20


class Result(Struct, frozen=True):
    """`litellm` is its version."""

    machine: Machine
    litellm: str | None
    plan: Plan
    figures: tuple[Row, ...]
    aegis_rounds: tuple[Round, ...]
    litellm_rounds: tuple[Round, ...]
    paces: tuple[Pace, ...]  # of the proxies' core, after each round
    idle: Idle


def run(json_path: Path | None = None, *, litellm: Path | None = None, plan: Plan | None = None) -> Result:
    """Measures, prints the figures and writes all to `json_path`. `litellm` is a Python that has `litellm[proxy]`;
    without it aegis is measured alone. Raises UserError."""
    if json_path:
        result_files.check(json_path)
    plan, version = plan or Plan(), litellm_version(litellm) if litellm else None
    machine, cores = describe(), Cores.of_this_process()
    with kept_to(cores.rest):
        ours, theirs, paces, idle = uvloop.run(_measure(litellm, cores, plan))
    rows = (*_compared(ours, theirs), _pace_row(paces), *_idle_rows(idle))
    result = Result(machine, version, plan, rows, tuple(ours), tuple(theirs), tuple(paces), idle)
    show(rows, alone=version is None)
    if json_path:
        result_files.write_json(json_path, result)
    return result


async def _measure(litellm: Path | None, cores: Cores, plan: Plan) -> tuple[list[Round], list[Round], list[Pace], Idle]:
    paces: list[Pace] = []
    async with AsyncExitStack() as stack:
        sides = [(await stack.enter_async_context(aegis_side(cores.proxy)), list[Round]())]
        if litellm:
            sides.append((await stack.enter_async_context(litellm_side(litellm, cores.proxy)), list[Round]()))
        for side, _ in sides:
            await warm_up(side, _warm_up(plan))
        for number in range(plan.rounds):
            for side, rounds in sides if number % 2 else reversed(sides):
                rounds.append(await measure(side, plan))
            paces.append(pace(cores.proxy, sides[0][1][-1].whole.added_p50_ms, plan.asks))
    async with aegis_side(cores.proxy) as one, aegis_side(cores.proxy) as other:
        for fresh in (one, other):
            await warm_up(fresh, _warm_up(plan))
        idle = await measure_idle((one, other), plan)
    return sides[0][1], sides[1][1] if litellm else [], paces, idle


def _warm_up(plan: Plan) -> int:
    return min(_WARM_UP, plan.asks)


def _compared(ours: Sequence[Round], theirs: Sequence[Round]) -> list[Row]:
    def row(name: str, unit: str, of: Callable[[Round], float], most: float | None, least: float | None) -> Row:
        mine, other = median(map(of, ours)), median(map(of, theirs)) if theirs else None
        return compared(name, unit, mine, other, most=most, least=least)

    latency, rate = LATENCY_RATIO_MAX, RATE_RATIO_MIN
    return [
        row("added to a request, p50", "ms", lambda r: r.whole.added_p50_ms, latency, None),
        row("added to a request, p99", "ms", lambda r: r.whole.added_p99_ms, latency, None),
        row("added to a stream, p50", "ms", lambda r: r.stream.added_p50_ms, latency, None),
        row("added to a stream, p99", "ms", lambda r: r.stream.added_p99_ms, latency, None),
        row("added to its first token, p50", "ms", lambda r: r.stream.added_first_ms, latency, None),
        row("requests on one core", "1/s", lambda r: r.requests.per_s, None, rate),
        row("streamed tokens on one core", "1/s", lambda r: r.tokens.per_s, None, None),
        row("backend alone, a request", "ms", lambda r: r.whole.direct_ms, None, None),
        row("backend alone, a stream", "ms", lambda r: r.stream.direct_ms, None, None),
        row("core used with requests", "", lambda r: r.requests.busy, None, None),
        row("core used with streams", "", lambda r: r.tokens.busy, None, None),
    ]


def _pace_row(paces: Sequence[Pace]) -> Row:
    return Row("a loop as long as that request, p99 less p50", "ms", median(p.p99_ms - p.p50_ms for p in paces))


def _idle_rows(idle: Idle) -> list[Row]:
    more = max(idle.grown_bytes) / _MIB
    pairs = list(zip(idle.beside, idle.without, strict=True))
    p50, p99 = (
        median((b.direct_ms + b.added_p50_ms) / (a.direct_ms + a.added_p50_ms) for b, a in pairs),
        median((b.direct_ms + b.added_p99_ms) / (a.direct_ms + a.added_p99_ms) for b, a in pairs),
    )
    name = f"{idle.streams} idle streams"
    return [
        Row(f"{name}: memory", "MiB", more, wanted=f"≤ {IDLE_MIB_MAX:g}", ok=more <= IDLE_MIB_MAX),
        Row(f"{name}: a request's p50, ÷ without", "", p50, wanted=f"≤ {IDLE_RATIO_MAX:g}", ok=p50 <= IDLE_RATIO_MAX),
        Row(f"{name}: its p99, ÷ without", "", p99),
    ]
