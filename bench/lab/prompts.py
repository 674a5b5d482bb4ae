"""How many prompts per second one model takes when many come at once: `aegis lab prompts`.

Prompts of `TOKENS` tokens, `PROMPTS` of them at the same moment, each for one token of answer, go to a model of 50
million parameters in bfloat16, on two servers in turns: one as it is by default, whose prompts share steps, and one
whose policy runs them one by one. Then the same in float32, in which the answers have to be the same, to the token.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import httpx
from msgspec import Struct
from rich.console import Console

from aegis.core.rng import Stream
from bench.common import result_files
from bench.common.figures import Figure, at_least
from bench.common.machine import Machine, describe
from bench.common.served import served
from bench.lab.decode.engine_side import CHECKPOINTS, build
from bench.lab.proxy.model import write_text

PROMPTS = 32
TOKENS = 100
ROUNDS = 5
RATIO_MIN = 1.5
_WARM_ROUNDS = 2  # in which instances learn what steps take
_ONE_BY_ONE = ("--policy", "prefill-first")
_WAIT_S = 600.0
_CHECKPOINT, _MODEL = "50m", "prompts-50m"
_DTYPES = ("bfloat16", "float32")


class Round(Struct, frozen=True):
    """`PROMPTS` prompts at once: the time until the last answer, and the token of each."""

    together: bool
    seconds: float
    tokens: tuple[int, ...]


class Result(Struct, frozen=True):
    machine: Machine
    figures: tuple[Figure, ...]
    rounds: tuple[Round, ...]


def run(json_path: Path | None = None, *, rounds: int = ROUNDS, options: Sequence[str] = ()) -> Result:
    """Measures, prints the figures and writes all to `json_path`. `options` are for both servers. Raises UserError."""
    if json_path:
        result_files.check(json_path)
    with tempfile.TemporaryDirectory(prefix="aegis-prompts-") as directory:
        write_checkpoint(Path(directory) / _MODEL)
        quick, exact = (_in_turns(directory, rounds, (*options, "--dtype", dtype)) for dtype in _DTYPES)
    found = (*quick, *exact)
    result = Result(describe(), tuple(_figures(quick, exact)), found)
    console = Console(markup=False, highlight=False)
    for figure in result.figures:
        console.print(f"{figure.name:50} {figure.value:10.4g} {figure.unit} {figure.wanted}".rstrip())
    if json_path:
        result_files.write_json(json_path, result)
    return result


def _in_turns(directory: str, rounds: int, options: Sequence[str]) -> tuple[Round, ...]:
    launched = ("--models", directory, "--mixed", "1", "--prefix-reuse", "off", *options)
    with served(launched) as together, served([*launched, *_ONE_BY_ONE]) as singly:
        return tuple(asyncio.run(_measure(together, singly, rounds)))


def write_checkpoint(directory: Path) -> None:
    """Writes a checkpoint whose weights are drawn."""
    build(_CHECKPOINT, "bfloat16").save_pretrained(directory)
    write_text(directory, vocabulary=CHECKPOINTS[_CHECKPOINT].vocab_size)


def _figures(quick: Sequence[Round], exact: Sequence[Round]) -> list[Figure]:
    """The figures of the rounds in bfloat16 and in float32."""
    figures = list[Figure]()
    for dtype, rounds in zip(_DTYPES, (quick, exact), strict=True):
        shared_s, alone_s = (median(each.seconds for each in rounds[at::2]) for at in (0, 1))
        ratio = alone_s / shared_s
        figures += [
            Figure(f"{dtype}: prompts that share steps", PROMPTS / shared_s, "prompts/s"),
            Figure(f"{dtype}: one by one", PROMPTS / alone_s, "prompts/s"),
            Figure(f"{dtype}: ratio", ratio, "")
            if rounds is exact
            else at_least(f"{dtype}: ratio", ratio, "", RATIO_MIN),
        ]
    same = [a.tokens == b.tokens for a, b in zip(exact[::2], exact[1::2], strict=True)]
    return [*figures, at_least("float32: rounds whose tokens are the same", sum(same) / len(same), "", 1.0)]


async def _measure(together: str, singly: str, rounds: int) -> list[Round]:
    limits = httpx.Limits(max_connections=PROMPTS)
    found = list[Round]()
    async with (
        httpx.AsyncClient(base_url=together, timeout=_WAIT_S, trust_env=False, limits=limits) as sharing,
        httpx.AsyncClient(base_url=singly, timeout=_WAIT_S, trust_env=False, limits=limits) as alone,
    ):
        for number in range(_WARM_ROUNDS + rounds):
            pair = [await _round(sharing, number), await _round(alone, number)]
            if number >= _WARM_ROUNDS:
                found += [Round(at == 0, *each) for at, each in enumerate(pair)]
    return found


async def _round(client: httpx.AsyncClient, number: int) -> tuple[float, tuple[int, ...]]:
    began_s = time.monotonic()
    tokens = await asyncio.gather(*(_ask(client, _prompt(number, at)) for at in range(PROMPTS)))
    return time.monotonic() - began_s, tuple(tokens)


async def _ask(client: httpx.AsyncClient, prompt: list[int]) -> int:
    body = {"model": _MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0, "return_token_ids": True}
    reply = (await client.post("/v1/completions", json=body)).raise_for_status()
    (token,) = reply.json()["choices"][0]["token_ids"]
    return int(token)


def _prompt(number: int, at: int) -> list[int]:
    draws, vocabulary = Stream(number * PROMPTS + at, "bench prompts"), CHECKPOINTS[_CHECKPOINT].vocab_size
    return [draws.below(vocabulary) for _ in range(TOKENS)]
