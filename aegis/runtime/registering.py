"""Registers models beside serving: one registrar process for any number of sources, ended when it is done."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from aegis.core.errors import ModelRefused
from aegis.core.ids import ModelId
from aegis.core.model import EngineName, ModelSpec
from aegis.models.registrar import Answer, Job, Progress, Refused, Registered
from aegis.models.sources import Source
from aegis.runtime.processes import follow_launcher

START_S = 180.0
"""Until the first word of a registrar, which imports much."""

Report = Callable[[ModelId, str], None]


class Register(Protocol):
    """How checkpoints become models: `register`, here."""

    def __call__(
        self,
        sources: Sequence[Source],
        *,
        dtype: str,
        cache_dir: Path,
        limit_bytes: int,
        report: Report = ...,
        renew: bool = False,
        engine: EngineName = ...,
        ranks: int = ...,
    ) -> AsyncIterator[tuple[Source, ModelSpec | ModelRefused]]: ...


async def register(
    sources: Sequence[Source],
    *,
    dtype: str,
    cache_dir: Path,
    limit_bytes: int,
    report: Report = lambda _model, _text: None,
    renew: bool = False,
    engine: EngineName = "transformers",
    ranks: int = 1,
) -> AsyncIterator[tuple[Source, ModelSpec | ModelRefused]]:
    """Yields what became of each source, in order. A registrar that dies refuses the source it was at. With `renew`
    images that are there already are made again."""
    waiting = list(sources)
    while waiting:
        doing = ""
        try:
            jobs = [Job(s, dtype, str(cache_dir), limit_bytes, renew, engine, ranks) for s in waiting]
            async for answer in _run(jobs):
                match answer:
                    case Progress(model, text):
                        doing = text
                        report(model, text)
                    case Registered(spec):
                        yield waiting.pop(0), spec
                    case Refused(_, reason):
                        yield waiting.pop(0), ModelRefused(reason)
        except _Stalled as stalled:
            source = waiting.pop(0)
            took = f"took more than {stalled.within_s:.0f} s"
            yield source, ModelRefused(f"{source.root}: {doing or 'starting'} {took}; it was given up")
            continue
        if waiting:
            source = waiting.pop(0)
            yield source, ModelRefused(f"{source.root}: the process that read it ended abruptly (out of memory?)")


class _Stalled(Exception):
    def __init__(self, within_s: float) -> None:
        super().__init__()
        self.within_s = within_s


async def _line(answers: asyncio.StreamReader, within_s: float) -> bytes:
    """Raises _Stalled."""
    try:
        async with asyncio.timeout(within_s):
            return await answers.readline()
    except TimeoutError:
        raise _Stalled(within_s) from None


async def _run(jobs: Sequence[Job]) -> AsyncIterator[Answer]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "aegis.runtime.registrar",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 26,
        env={"OMP_NUM_THREADS": "1", **os.environ},
        preexec_fn=follow_launcher,
    )
    assert process.stdin is not None and process.stdout is not None
    within_s = START_S
    try:
        process.stdin.writelines(msgspec.json.encode(job) + b"\n" for job in jobs)
        process.stdin.close()
        while line := await _line(process.stdout, within_s):
            answer = msgspec.json.decode(line, type=Answer)
            within_s = answer.within_s if isinstance(answer, Progress) else START_S
            yield answer
        await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
