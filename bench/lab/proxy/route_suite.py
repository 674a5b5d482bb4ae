"""What aegis's proxy adds to a request of each route, beside what LiteLLM's adds to it: `aegis lab proxy --routes`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median

import uvloop
from msgspec import Struct

from bench.common import result_files
from bench.common.machine import Machine, describe
from bench.lab.proxy.child import Cores, kept_to
from bench.lab.proxy.figures import LATENCY_RATIO_MAX, Row, compared, show
from bench.lab.proxy.rounds import Latency, Plan, latency, warm_up
from bench.lab.proxy.routes import Route
from bench.lab.proxy.sides import Side, aegis_side, litellm_side, litellm_version

_WARM_UP = 50


class RouteRound(Struct, frozen=True):
    """Answers in one piece, and streams where the route has them."""

    route: str
    whole: Latency
    stream: Latency | None


class RoutesResult(Struct, frozen=True):
    """`litellm` is its version."""

    machine: Machine
    litellm: str | None
    plan: Plan
    figures: tuple[Row, ...]
    aegis_rounds: tuple[RouteRound, ...]
    litellm_rounds: tuple[RouteRound, ...]


def run(
    routes: Sequence[Route],
    json_path: Path | None = None,
    *,
    litellm: Path | None = None,
    plan: Plan | None = None,
) -> RoutesResult:
    """As `suite.run`, with latencies alone, and the processor time of each request, which other work of the machine
    changes less."""
    if json_path:
        result_files.check(json_path)
    plan, version = plan or Plan(), litellm_version(litellm) if litellm else None
    machine, cores = describe(), Cores.of_this_process()
    with kept_to(cores.rest):
        ours, theirs = uvloop.run(_measure(routes, litellm, cores, plan))
    rows = tuple(row for route in routes for row in _rows(route, ours, theirs))
    result = RoutesResult(machine, version, plan, rows, tuple(ours), tuple(theirs))
    show(rows, alone=version is None)
    if json_path:
        result_files.write_json(json_path, result)
    return result


async def _measure(
    routes: Sequence[Route], litellm: Path | None, cores: Cores, plan: Plan
) -> tuple[list[RouteRound], list[RouteRound]]:
    async with AsyncExitStack() as stack:
        sides = [(await stack.enter_async_context(aegis_side(cores.proxy)), list[RouteRound]())]
        if litellm:
            sides.append((await stack.enter_async_context(litellm_side(litellm, cores.proxy)), list[RouteRound]()))
        for side, _ in sides:
            for route in routes:
                await warm_up(side, min(_WARM_UP, plan.asks), route)
        for number in range(plan.rounds):
            for route in routes:
                for side, rounds in sides if number % 2 else reversed(sides):
                    rounds.append(await _round(side, route, plan.asks))
    return sides[0][1], sides[1][1] if litellm else []


async def _round(side: Side, route: Route, asks: int) -> RouteRound:
    whole = await latency(side, asks, stream=False, route=route)
    return RouteRound(route.name, whole, await latency(side, asks, stream=True, route=route) if route.streams else None)


def _rows(route: Route, ours: Sequence[RouteRound], theirs: Sequence[RouteRound]) -> list[Row]:
    def of(rounds: Sequence[RouteRound], *, stream: bool) -> list[Latency]:
        mine = [each for each in rounds if each.route == route.name]
        return [each.stream for each in mine if each.stream] if stream else [each.whole for each in mine]

    def row(
        name: str, figure: Callable[[Latency], float], *, stream: bool = False, most: float | None = LATENCY_RATIO_MAX
    ) -> Row:
        mine, other = (list(map(figure, of(rounds, stream=stream))) for rounds in (ours, theirs))
        return compared(f"{route.name}: {name}", "ms", median(mine), median(other) if other else None, most=most)

    rows = [
        row("added to a request, p50", lambda took: took.added_p50_ms),
        row("added to a request, p99", lambda took: took.added_p99_ms),
        row("processor time of a request", lambda took: took.processor_ms, most=None),
    ]
    if route.streams:
        rows += [
            row("added to a stream, p50", lambda took: took.added_p50_ms, stream=True),
            row("added to a stream, p99", lambda took: took.added_p99_ms, stream=True),
            row("added to its first token, p50", lambda took: took.added_first_ms, stream=True),
            row("processor time of a stream", lambda took: took.processor_ms, stream=True, most=None),
        ]
    return rows
