"""`aegis ctl`, as users give it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Sequence

from tests.live.server import ROOT, Server
from tests.live.streams import Body, Stream, run_again, until

Done = subprocess.CompletedProcess[str]


def ctl(server: Server, *words: str, mqtt: str | None = None) -> Done:
    """To the broker at `mqtt`, or the server's own."""
    how = ["--mqtt", mqtt] if mqtt else ["--url", server.url]
    command = [sys.executable, "-m", "aegis.cli.main", "ctl", *how, "--timeout", "300", *words]
    variables = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, env=variables, timeout=600)


def while_streams_run(
    order: Callable[[], Done], url: str, bodies: Sequence[Body], undisturbed: list[list[int]], *, tokens: int
) -> Done:
    """The answer to an order that is given once streams have so many tokens together, and which harms none of them."""
    answers: list[Done] = []

    async def give(streams: Sequence[Stream]) -> None:
        await until(lambda: sum(len(stream.tokens) for stream in streams) >= tokens, "the moment to order it")
        answers.append(await asyncio.to_thread(order))

    asked = run_again(url, bodies, give)
    assert [stream.error for _, stream in asked] == [None] * len(asked)
    assert all(stream.done and stream.tokens == undisturbed[number] for number, stream in asked)
    return answers[0]
