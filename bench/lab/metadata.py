"""The cost of recording requests: the same streams with the embedded Redis and without: `aegis lab metadata`.

Both servers run all the time, and one is measured while the other idles, A B, B A, …, so that other work of the machine
affects both alike. The figures are medians over the pairs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import httpx
from msgspec import Struct
from rich.console import Console

from bench.common import result_files
from bench.common.figures import Figure, at_least
from bench.common.machine import Machine, describe
from bench.common.processes import cpu_s
from bench.common.served import launched

STREAMS = 64
PAIRS = 32
RATE_MIN = 0.97
_TOKENS = 192
_WAIT_S = 600.0


class Round(Struct, frozen=True):
    """All streams of one server, from the first request to the last token. Processor time is of the launcher, its
    instances and its Redis."""

    tokens_per_s: float
    cpu_s: float


class Result(Struct, frozen=True):
    machine: Machine
    figures: tuple[Figure, ...]
    recorded: tuple[Round, ...]
    bare: tuple[Round, ...]


def run(
    json_path: Path | None = None, *, streams: int = STREAMS, pairs: int = PAIRS, options: Sequence[str] = ()
) -> Result:
    """Measures, prints the figures and writes all to `json_path`. `options` are for both servers. Raises UserError."""
    if json_path:
        result_files.check(json_path)
    recorded, bare = _measure(streams, pairs, options)
    rate = median(a.tokens_per_s / b.tokens_per_s for a, b in zip(recorded, bare, strict=True))
    cpu = median(a.cpu_s / b.cpu_s for a, b in zip(recorded, bare, strict=True))
    figures = (
        Figure("tokens a second, requests not recorded", median(x.tokens_per_s for x in bare), "tokens/s"),
        Figure("tokens a second, requests recorded", median(x.tokens_per_s for x in recorded), "tokens/s"),
        at_least(f"recorded ÷ not recorded, {streams} streams", rate, "", RATE_MIN),
        Figure("processor time, recorded ÷ not recorded", cpu, ""),
    )
    result = Result(describe(), figures, tuple(recorded), tuple(bare))
    console = Console(markup=False, highlight=False)
    for figure in figures:
        console.print(f"{figure.name:44} {figure.value:10.4g} {figure.unit} {figure.wanted}".rstrip())
    if json_path:
        result_files.write_json(json_path, result)
    return result


def _measure(streams: int, pairs: int, options: Sequence[str]) -> tuple[list[Round], list[Round]]:
    with launched(options) as recording, launched([*options, "--redis", "off"]) as without:
        sides = [(recording, list[Round]()), (without, list[Round]())]
        for server, _ in sides:
            asyncio.run(_streams(server.url, streams))  # everything is loaded and warm
        for number in range(pairs):
            for server, rounds in sides if number % 2 else reversed(sides):
                rounds.append(_round(server.url, server.launcher, streams))
    return sides[0][1], sides[1][1]


def _round(url: str, process: int, streams: int) -> Round:
    used_s, began_s = cpu_s(process), time.monotonic()
    tokens = asyncio.run(_streams(url, streams))
    took_s = time.monotonic() - began_s
    return Round(tokens / took_s, cpu_s(process) - used_s)


async def _streams(url: str, streams: int) -> int:
    """Tokens of all of them, dealt to the models in turn."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=_WAIT_S, limits=limits, trust_env=False) as client:
        models = [model["id"] for model in (await client.get("/v1/models")).json()["data"]]
        await asyncio.gather(*[_stream(client, models[n % len(models)], n) for n in range(streams)])
    return streams * _TOKENS


async def _stream(client: httpx.AsyncClient, model: str, number: int) -> None:
    body = {"model": model, "prompt": f"Tell me story {number}.", "max_tokens": _TOKENS, "temperature": 0}
    done = False
    async with client.stream("POST", "/v1/completions", json=body | {"stream": True, "ignore_eos": True}) as reply:
        reply.raise_for_status()
        async for line in reply.aiter_lines():
            done = line == "data: [DONE]" or done
    assert done, "a stream was not answered"
