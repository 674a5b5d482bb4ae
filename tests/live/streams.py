"""Clients: streamed completions, many at once, each token kept with the moment it came."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from aegis.core.rng import Stream as Draws
from tests.checkpoints import VOCAB_SIZE

WAIT_S = 240.0
_POLL_S = 0.005

Body = dict[str, Any]


@dataclass(slots=True)
class Stream:
    """One streamed completion as far as it has come. `error` is the terminal event of one that failed, `proxy` who
    answers."""

    body: Body
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    error: dict[str, Any] | None = None
    done: bool = False
    arrivals_s: list[float] = field(default_factory=list)
    proxy: str = ""
    left: bool = False

    @property
    def ended(self) -> bool:
        return self.done or self.error is not None

    @property
    def longest_gap_s(self) -> float:
        return max((b - a for a, b in zip(self.arrivals_s, self.arrivals_s[1:], strict=False)), default=0.0)

    def leave(self) -> None:
        """Loses interest, at the next token."""
        self.left = True

    async def run(self, client: httpx.AsyncClient) -> None:
        body = self.body | {"stream": True, "return_token_ids": True}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            self.proxy = response.headers["x-aegis-proxy"]
            if response.is_error:
                await response.aread()
                self.error = response.json()["error"]
                return
            async for line in response.aiter_lines():
                if self.left:
                    return
                if line.startswith("data: "):
                    self._take(line.removeprefix("data: "))

    def _take(self, data: str) -> None:
        assert not self.ended, f"after the end of a stream: {data}"
        if data == "[DONE]":
            self.done = True
            return
        event = json.loads(data)
        if "error" in event:
            self.error = event["error"]
            return
        (choice,) = event["choices"]
        self.tokens += choice["token_ids"]
        self.text += choice["text"]
        self.finish = choice["finish_reason"] or self.finish
        self.arrivals_s.append(time.monotonic())


def drawn_bodies(name: str, models: Sequence[str], count: int, max_tokens: int) -> list[Body]:
    """Requests with drawn prompts to the models in turn, the second, fourth, ... of which are sampled."""
    bodies: list[Body] = []
    for n in range(count):
        draws = Draws(0, name, n)
        prompt = [draws.below(VOCAB_SIZE) for _ in range(1 + draws.below(100))]
        body = {"model": models[n % len(models)], "prompt": prompt, "max_tokens": max_tokens}
        bodies.append(body | {"ignore_eos": True, "seed": n, "temperature": n % 2})
    return bodies


def client_of(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=url, timeout=WAIT_S, limits=limits, trust_env=False, verify=False)


async def until(condition: Callable[[], bool], what: str, within_s: float = WAIT_S) -> None:
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {within_s:.0f} s: {what}"
        await asyncio.sleep(_POLL_S)


Meanwhile = Callable[[Sequence[Stream]], Awaitable[None]]


def run_all(url: str, bodies: Sequence[Body], meanwhile: Meanwhile | None = None) -> list[Stream]:
    """Streams all of them at once to their ends; `meanwhile` is what happens beside."""
    streams = [Stream(body) for body in bodies]

    async def main() -> None:
        async with client_of(url) as client, asyncio.TaskGroup() as group:
            for stream in streams:
                group.create_task(stream.run(client))
            if meanwhile:
                await meanwhile(streams)

    asyncio.run(main())
    return streams


def run_again(url: str, bodies: Sequence[Body], meanwhile: Meanwhile) -> list[tuple[int, Stream]]:
    """A client for each body, which asks again whenever it is answered until `meanwhile` is over: however fast the
    server is, streams run all the time. All streams to their ends, with the numbers of their bodies."""
    asked: list[tuple[int, Stream]] = []
    streams: list[Stream] = []
    over = asyncio.Event()

    async def ask(number: int, client: httpx.AsyncClient) -> None:
        while not over.is_set():
            stream = Stream(bodies[number])
            asked.append((number, stream))
            streams.append(stream)
            await stream.run(client)

    async def main() -> None:
        async with client_of(url) as client, asyncio.TaskGroup() as group:
            for number in range(len(bodies)):
                group.create_task(ask(number, client))
            await meanwhile(streams)
            over.set()

    asyncio.run(main())
    return asked
