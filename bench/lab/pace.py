"""The gaps that a reader sees, as tokens are made and at a smooth pace: `aegis lab pace`.

A market of several models on one small device, with twice as many streams as are on time at once: while one model has
its turn, streams of the others stand still. Their clients ask again when they are answered. They have windows of both
paces in turn, of the same server, so that other work of the machine affects both alike.

A gap is the time from one event with a token to the next one of its stream. It counts where that token was on time:
token i within TTFT + i TBT, and half a TBT for its way. A stream that is late is held back at no pace.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import httpx
import msgspec
from msgspec import Struct
from rich.console import Console

from aegis.core.clock import NS_PER_MS, NS_PER_S
from aegis.core.errors import UserError
from aegis.core.model import Pace, Slo
from bench.common import result_files
from bench.common.figures import Figure, at_least, at_most
from bench.common.machine import Machine, describe
from bench.common.served import served

STREAMS = 16
WINDOW_S = 30.0
ROUNDS = 2
OPTIONS = ("--mixed", "1")
SMOOTH_TBT_MAX = 1.5
MADE_S_MIN = 1.0
_ANSWER_SHARE = 2  # of the context
_WAIT_S = 600.0
_PACES: tuple[Pace, ...] = ("made", "smooth")


class Stream(Struct, frozen=True):
    """One answer as its client had it: when each event came that has tokens, and how many tokens had come by then."""

    model: str
    pace: Pace
    sent_ns: int
    came_ns: tuple[int, ...]
    tokens: tuple[int, ...]


class Gaps(Struct, frozen=True):
    """Of the streams of one pace. `on_time_share` of their tokens were; gaps are those before tokens that were."""

    pace: Pace
    streams: int
    tokens: int
    on_time_share: float
    p50_ms: float
    p99_ms: float
    max_ms: float


class Result(Struct, frozen=True):
    machine: Machine
    options: tuple[str, ...]
    tbt_ms: float
    figures: tuple[Figure, ...]
    gaps: tuple[Gaps, ...]


def run(
    json_path: Path | None = None,
    *,
    streams: int = STREAMS,
    window_s: float = WINDOW_S,
    rounds: int = ROUNDS,
    options: Sequence[str] = OPTIONS,
    slo: Slo | None = None,
    trace: Path | None = None,
) -> Result:
    """Measures, prints the figures and writes all to `json_path`, and every stream to `trace`. Raises UserError."""
    for path in filter(None, (json_path, trace)):
        result_files.check(path)
    slo, machine = slo or Slo(), describe()
    told = ("--slo", f"ttft={slo.ttft_ns / NS_PER_S:g},tbt={slo.tbt_ns / NS_PER_S:g}")
    with served([*options, *told], remembers=False) as url:
        all_streams = asyncio.run(_windows(url, streams, window_s, rounds))
    gaps = tuple(gaps_of(pace, [each for each in all_streams if each.pace == pace], slo) for pace in _PACES)
    result = Result(machine, tuple(options), slo.tbt_ns / NS_PER_MS, _figures(*gaps, slo=slo), gaps)
    _print(result)
    if json_path:
        result_files.write_json(json_path, result)
    if trace:
        result_files.write(trace, msgspec.json.Encoder().encode_lines(all_streams))
    return result


def gaps_of(pace: Pace, streams: Sequence[Stream], slo: Slo) -> Gaps:
    """Raises UserError where no token was on time."""
    gaps_ns, on_time, tokens = list[int](), 0, 0
    for stream in streams:
        before = 0
        for at, (came_ns, count) in enumerate(zip(stream.came_ns, stream.tokens, strict=True)):
            late = came_ns > slo.due_ns(stream.sent_ns, before) + slo.tbt_ns // 2
            tokens, on_time, before = tokens + count - before, on_time + (0 if late else count - before), count
            if at and not late:
                gaps_ns.append(came_ns - stream.came_ns[at - 1])
    if not gaps_ns:
        raise UserError(f"no token was on time at the pace {pace!r}: this machine is too slow for what is asked of it")
    gaps_ns.sort()
    p50, p99 = (gaps_ns[len(gaps_ns) * percent // 100] / NS_PER_MS for percent in (50, 99))
    return Gaps(pace, len(streams), tokens, on_time / tokens, p50, p99, gaps_ns[-1] / NS_PER_MS)


def _figures(made: Gaps, smooth: Gaps, *, slo: Slo) -> tuple[Figure, ...]:
    return (
        at_least("gap as made, p99", made.p99_ms / 1e3, "s", MADE_S_MIN),
        Figure("gap as made, longest", made.max_ms / 1e3, "s"),
        at_most("gap at a smooth pace, p99 ÷ TBT", smooth.p99_ms * NS_PER_MS / slo.tbt_ns, "", SMOOTH_TBT_MAX),
        Figure("gap at a smooth pace, p99", smooth.p99_ms / 1e3, "s"),
        Figure("gap at a smooth pace, longest", smooth.max_ms / 1e3, "s"),
        Figure("tokens on time, as made", 100 * made.on_time_share, "%"),
        Figure("tokens on time, at a smooth pace", 100 * smooth.on_time_share, "%"),
        Figure("tokens, as made", made.tokens, ""),
        Figure("tokens, at a smooth pace", smooth.tokens, ""),
    )


def _print(result: Result) -> None:
    console = Console(markup=False, highlight=False)
    for figure in result.figures:
        console.print(f"{figure.name:44} {figure.value:8.3g} {figure.unit:3} {figure.wanted}".rstrip())


# --- clients ----------------------------------------------------------------------------------------------------------


async def _windows(url: str, streams: int, window_s: float, rounds: int) -> list[Stream]:
    """Streams of a window that had not ended with it are among them, as far as they came."""
    found = list[Stream]()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=_WAIT_S, limits=limits, trust_env=False) as client:
        cards = (await client.get("/v1/models")).json()["data"]
        for number in range(rounds * len(_PACES)):
            pace, end_s = _PACES[number % len(_PACES)], time.monotonic() + window_s
            asking = [
                asyncio.create_task(_ask(client, cards[n % len(cards)], n, pace, end_s, found)) for n in range(streams)
            ]
            await asyncio.gather(*asking)
    return found


async def _ask(
    client: httpx.AsyncClient, card: dict[str, str | int], number: int, pace: Pace, end_s: float, found: list[Stream]
) -> None:
    """One answer after the other."""
    while time.monotonic() < end_s:
        body = {
            "model": card["id"],
            "prompt": f"Tell me story {number}.",
            "max_tokens": int(card["max_model_len"]) // _ANSWER_SHARE,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            "pace": pace,
        }
        sent_ns, came_ns, tokens = time.monotonic_ns(), list[int](), list[int]()
        try:
            async with asyncio.timeout(max(end_s - time.monotonic(), 0)):
                async for count in _tokens(client, body):
                    came_ns.append(time.monotonic_ns())
                    tokens.append(count + (tokens[-1] if tokens else 0))
        except TimeoutError:
            pass
        found.append(Stream(str(card["id"]), pace, sent_ns, tuple(came_ns), tuple(tokens)))


async def _tokens(client: httpx.AsyncClient, body: Mapping[str, object]) -> AsyncIterator[int]:
    """How many there are in each event that has any. Raises UserError."""
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        if reply.status_code != httpx.codes.OK:
            raise UserError(f"the server answers {reply.status_code}: {(await reply.aread()).decode()}")
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                choice = msgspec.json.decode(line[6:])["choices"][0]
                if made := choice.get("token_ids"):
                    yield len(made)
