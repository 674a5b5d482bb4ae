"""The messages of a server while it decodes, and their receivers, as the kernel sees them: `aegis lab token-path`.

strace watches the launcher, which is a proxy too, and the instances: each call that sends, and its peer. Three windows
are compared: a few streams, many, and as many while Redis, the broker and all of Ray are stopped (SIGSTOP). Calls that
a token needs grow with the tokens; calls that come now and then do not. And if a token's delivery waited for one of the
three, no token would be delivered while they are stopped.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from http import HTTPStatus
from importlib.util import find_spec
from pathlib import Path

import httpx
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from aegis.core.errors import UserError, install_advice
from bench.common import result_files
from bench.common.figures import Figure, at_least, at_most
from bench.common.machine import Machine, describe
from bench.common.processes import command_of, family
from bench.common.served import launched
from bench.lab import system_calls as sends
from bench.lab.socket_peers import KINDS, MQTT, OTHERS, RAY, REDIS, Peers

FEW, MANY = 2, 32
WINDOW_S = 5.0
GROWTH_MAX = 1.5
STILL_MIN = 0.5
_SERVICES = (REDIS, MQTT, RAY)
_INSTANCE = "-m aegis.instance.process"
_SERVING = ("-m aegis.cli.main launch", "-m proxy.live.process", _INSTANCE)
_PROMPT_ROOM = 64  # tokens of the context
_BEGUN_S = 120.0
_POLL_S = 0.01


class Window(Struct, frozen=True):
    """The calls while it was watched. `sends` are system calls by the kind of peer, `instance_sends` those of instances
    alone; `still`: Redis, the broker and Ray were stopped."""

    streams: int
    still: bool
    duration_s: float
    tokens: int
    sends: dict[str, int]
    instance_sends: dict[str, int]

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.duration_s

    @property
    def to_services_per_s(self) -> float:
        """Redis, the broker and Ray together."""
        return sum(self.sends[kind] for kind in _SERVICES) / self.duration_s


class Result(Struct, frozen=True):
    machine: Machine
    services: tuple[str, ...]  # that the server has spoken to
    figures: tuple[Figure, ...]
    windows: tuple[Window, ...]


def run(
    json_path: Path | None = None,
    *,
    ray: bool = False,
    options: Sequence[str] = (),
    streams: tuple[int, int] = (FEW, MANY),
    window_s: float = WINDOW_S,
) -> Result:
    """Measures, prints the windows and the figures, and writes all to `json_path`. `options` are the server's, `ray`:
    its instances are in a cluster of its own. Raises UserError."""
    if json_path:
        result_files.check(json_path)
    sends.check()
    if ray and find_spec("ray") is None:
        raise UserError(f"there is no Ray here; {install_advice('ray')}")
    with launched([*options, *(("--ray", "local") if ray else ())]) as server:
        windows = asyncio.run(_watched(server.url, server.launcher, streams, window_s))
    services = tuple(kind for kind in _SERVICES if any(window.sends[kind] for window in windows))
    result = Result(describe(), services, _figures(*windows), windows)
    _print(result)
    if json_path:
        result_files.write_json(json_path, result)
    return result


def _figures(few: Window, many: Window, still: Window) -> tuple[Figure, ...]:
    both = few, many, still
    return (
        Figure(f"tokens/s, {many.streams} streams ÷ {few.streams}", many.tokens_per_s / few.tokens_per_s, ""),
        at_most(
            f"sends/s to {', '.join(_SERVICES)}, {many.streams} streams ÷ {few.streams}",
            many.to_services_per_s / few.to_services_per_s,
            "",
            GROWTH_MAX,
        ),
        at_least("tokens/s while they stand still ÷ before", still.tokens_per_s / many.tokens_per_s, "", STILL_MIN),
        at_most(
            "sends of instances to Redis or Ray",
            sum(window.instance_sends[kind] for window in both for kind in (REDIS, RAY)),
            "",
            0,
        ),
        at_most("sends to anybody else", sum(window.sends[OTHERS] for window in both), "", 0),
    )


def _print(result: Result) -> None:
    console = Console(markup=False, highlight=False)
    table = Table("a second", *(_title(window) for window in result.windows), box=None)
    table.add_row("tokens", *(f"{window.tokens_per_s:.0f}" for window in result.windows))
    for kind in KINDS:
        table.add_row(f"sends to {kind}", *(f"{w.sends[kind] / w.duration_s:.1f}" for w in result.windows))
    console.print(table)
    for figure in result.figures:
        console.print(f"{figure.name:48} {figure.value:10.4g} {figure.unit} {figure.wanted}".rstrip())


def _title(window: Window) -> str:
    return f"{window.streams} streams" + (", they stand still" if window.still else "")


# --- watching ---------------------------------------------------------------------------------------------------------


async def _watched(url: str, launcher: int, streams: tuple[int, int], window_s: float) -> tuple[Window, ...]:
    few, many = streams
    async with _running(url, few) as arrivals:
        first, services = await _window(launcher, arrivals, few, window_s, still=())
    async with _running(url, many) as arrivals:
        second, more = await _window(launcher, arrivals, many, window_s, still=())
    async with _running(url, many) as arrivals:
        third, _ = await _window(launcher, arrivals, many, window_s, still=sorted(services | more))
    return first, second, third


async def _window(
    launcher: int, arrivals: list[float], streams: int, window_s: float, still: Sequence[int]
) -> tuple[Window, set[int]]:
    """And the processes of Redis, the broker and Ray that are spoken to."""
    server = {pid for pid in family(launcher) if any(word in command_of(pid) for word in _SERVING)}
    with sends.recorded(server) as recorded, _stopped(still):
        peers = Peers(server, os.getpid())
        began_s = time.time()
        await asyncio.sleep(window_s)
        ended_s = time.time()
        peers.look()
    counts, of_instances, services = Counter[str](), Counter[str](), set[int]()
    for send in recorded.sends:
        if began_s <= send.at_s < ended_s:
            kind = peers.kind(send)
            counts[kind] += 1
            of_instances[kind] += _INSTANCE in command_of(send.process)
            if kind in _SERVICES:
                services |= peers.at(send)
    tokens = sum(began_s <= at_s < ended_s for at_s in arrivals)
    said, by_instances = ({kind: count[kind] for kind in KINDS} for count in (counts, of_instances))
    return Window(streams, bool(still), ended_s - began_s, tokens, said, by_instances), services


@contextmanager
def _stopped(processes: Sequence[int]) -> Iterator[None]:
    for pid in processes:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in processes:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


# --- clients ----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _running(url: str, streams: int) -> AsyncIterator[list[float]]:
    """Streams that all have begun, and end afterwards; when each token came, in seconds since 1970."""
    arrivals: list[float] = []
    begun: set[int] = set()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=_BEGUN_S, limits=limits, trust_env=False) as client:
        card = (await client.get("/v1/models")).json()["data"][0]
        model, tokens = card["id"], card["max_model_len"] - _PROMPT_ROOM
        tasks = [asyncio.create_task(_stream(client, model, n, tokens, arrivals, begun)) for n in range(streams)]
        try:
            deadline_s = time.monotonic() + _BEGUN_S
            while len(begun) < streams:
                await _go_on(tasks)
                if time.monotonic() > deadline_s:
                    raise UserError(f"only {len(begun)} of {streams} streams began within {_BEGUN_S:.0f} s")
                await asyncio.sleep(_POLL_S)
            yield arrivals
            await _go_on(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _go_on(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Raises UserError if a stream has ended."""
    if ended := [task for task in tasks if task.done()]:
        await asyncio.gather(*ended)  # raises what went wrong
        raise UserError(f"{len(ended)} answers ended while they were watched")


async def _stream(
    client: httpx.AsyncClient, model: str, number: int, tokens: int, arrivals: list[float], begun: set[int]
) -> None:
    body = {"model": model, "prompt": f"Tell me story {number}.", "max_tokens": tokens, "temperature": 0}
    more = {"stream": True, "ignore_eos": True, "return_token_ids": True}
    async with client.stream("POST", "/v1/completions", json=body | more) as reply:
        if reply.status_code != HTTPStatus.OK:
            raise UserError(f"the server answers {reply.status_code}: {(await reply.aread()).decode()}")
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                arrivals.append(time.time())
                begun.add(number)
