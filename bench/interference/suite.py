"""A stream, a long prompt beside it, and a short prompt behind that one: how long each of them waits."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from aegis.core.clock import NS_PER_S
from aegis.core.errors import UserError
from aegis.core.ids import ModelId
from bench.common import machine, result_files
from bench.common.percentiles import percentile_of
from bench.serve.answer import Answer, RequestFailed
from bench.serve.client import Client, open_session
from bench.serve.models import choose, known_token_ids, root_of, served_models
from bench.serve.plan import Planned
from bench.serve.prompts import Draws, Wording

SHORT_TOKENS = 50
_SHORT_AFTER_S = 0.1
_LEAD_TOKENS = 20  # of the stream, before the long prompt comes
_SILENCE_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is measured. `other` None: long prompts go to the model that streams only."""

    base_url: str
    model: str
    other: str | None
    prompts: tuple[int, ...]
    stream_tokens: int
    repeat: int
    seed: int
    label: str


class Timeline(Struct, frozen=True, kw_only=True):
    """One run, in seconds since the long prompt was sent: when the stream's tokens came, and when the first tokens of
    the long prompt and of the short one, which was sent at `short_sent_s`."""

    tokens_s: list[float]
    long_s: float
    short_sent_s: float
    short_s: float


class Cell(Struct, frozen=True, kw_only=True):
    """Medians of the runs with a long prompt of `prompt_tokens`. Gaps are those of the stream from when the long prompt
    was sent until its first token came; `usual_gap_s` is that of the stream before. `alone_s` is the time to the long
    prompt's first token on the idle server."""

    prompt_tokens: int
    to: str  # "same" or "other"
    usual_gap_s: float
    longest_gap_s: float
    p99_gap_s: float
    short_ttft_s: float
    long_ttft_s: float
    alone_s: float
    timeline: Timeline  # of the first run


class Result(Struct, frozen=True, kw_only=True):
    label: str
    machine: machine.Machine
    stream_tokens: int
    repeat: int
    cells: list[Cell]


def lengths_of(text: str) -> tuple[int, ...]:
    """Raises UserError."""
    try:
        lengths = tuple(int(part) for part in text.split(","))
    except ValueError:
        lengths = ()
    if not lengths or min(lengths) < 1:
        raise UserError(f"--prompts: {text!r} should be lengths in tokens, like 512,4000")
    return lengths


def run(setting: Setting, file: Path | None) -> Result:
    """Measures and prints a table. Raises UserError where the server does not answer."""
    if file is not None:
        result_files.check(file)
    try:
        cells = asyncio.run(_measure(setting))
    except RequestFailed as error:
        raise UserError(f"{setting.base_url}: {error}") from None
    result = Result(
        label=setting.label,
        machine=machine.describe(),
        stream_tokens=setting.stream_tokens,
        repeat=setting.repeat,
        cells=cells,
    )
    Console(markup=False, highlight=False).print(_table(result))
    if file is not None:
        result_files.write_json(file, msgspec.to_builtins(result))
    return result


async def _measure(setting: Setting) -> list[Cell]:
    url, key = root_of(setting.base_url), os.environ.get("OPENAI_API_KEY")
    targets = [("same", setting.model)] + ([("other", setting.other)] if setting.other else [])
    # some servers, such as llama.cpp's, close connections that they have promised to keep
    async with open_session(key, silence_s=_SILENCE_S, keeps=False) as session:
        cards = choose(await served_models(session, url), [model for _, model in targets])
        wording = Wording(
            chat=False,
            draws=Draws(setting.seed, max(*setting.prompts, SHORT_TOKENS)),
            token_ids=await known_token_ids(session, url, [card.model for card in cards]),
            returning=frozenset(card.model for card in cards if card.returns_token_ids),
            ignore_eos=True,
            extra={"temperature": 0},
        )
        asking = _Asking(Client(session, f"{url}/v1/completions", key), wording)
        for _, model in targets:  # brings it in
            await asking.first_token_s(model, SHORT_TOKENS)
        cells = []
        for to, model in targets:
            for length in setting.prompts:
                runs = [await _run(asking, setting, model, length) for _ in range(setting.repeat)]
                cells.append(_cell(length, to, runs))
        return cells


class _Asking:
    """Each prompt begins otherwise, so that no server knows its beginning already."""

    def __init__(self, client: Client, wording: Wording) -> None:
        self._client = client
        self._wording = wording
        self._asked = 0

    async def first_token_s(self, model: str, length: int) -> float:
        start_ns = time.monotonic_ns()
        answer = Answer()
        await self.ask(model, length, 1, answer)
        return (answer.token_times_ns(time.monotonic_ns())[0] - start_ns) / NS_PER_S

    async def ask(self, model: str, length: int, tokens: int, answer: Answer) -> None:
        self._asked += 1
        body = self._wording.body(Planned(0, ModelId(model), length, tokens), self._asked)
        await self._client.ask(body, answer, time.monotonic_ns)


@dataclass(frozen=True, slots=True)
class _Run:
    usual_gaps_s: list[float]
    gaps_s: list[float]
    short_ttft_s: float
    long_ttft_s: float
    alone_s: float
    timeline: Timeline


async def _run(asking: _Asking, setting: Setting, model: str, length: int) -> _Run:
    alone_s = await asking.first_token_s(model, length)
    answer = Answer()
    stream = asyncio.create_task(asking.ask(setting.model, SHORT_TOKENS, setting.stream_tokens, answer))
    try:
        while answer.seen < _LEAD_TOKENS and not stream.done():
            await asyncio.sleep(0.01)
        sent_ns = time.monotonic_ns()
        long = asyncio.create_task(asking.first_token_s(model, length))
        await asyncio.sleep(_SHORT_AFTER_S)
        short_ttft_s = await asking.first_token_s(model, SHORT_TOKENS)
        long_ttft_s = await long
        long_ns = sent_ns + round(long_ttft_s * NS_PER_S)
        await stream
    finally:
        stream.cancel()
    times_ns = answer.token_times_ns(time.monotonic_ns())
    usual_s = gaps_s(times_ns, until_ns=sent_ns)
    timeline = Timeline(
        tokens_s=[round((at_ns - sent_ns) / NS_PER_S, 4) for at_ns in times_ns],
        long_s=round(long_ttft_s, 4),
        short_sent_s=_SHORT_AFTER_S,
        short_s=round(_SHORT_AFTER_S + short_ttft_s, 4),
    )
    gaps = gaps_s(times_ns, since_ns=sent_ns, until_ns=long_ns)
    return _Run(usual_s, gaps, short_ttft_s, long_ttft_s, alone_s, timeline)


def gaps_s(times_ns: list[int], *, since_ns: int = 0, until_ns: int) -> list[float]:
    """Between two tokens, of which the later one came after `since_ns` and the earlier one before `until_ns`."""
    pairs = pairwise(times_ns)
    return [(after - before) / NS_PER_S for before, after in pairs if after > since_ns and before < until_ns]


def _cell(length: int, to: str, runs: list[_Run]) -> Cell:
    return Cell(
        prompt_tokens=length,
        to=to,
        usual_gap_s=median([median(run.usual_gaps_s) for run in runs if run.usual_gaps_s] or [0.0]),
        longest_gap_s=median([max(run.gaps_s, default=0.0) for run in runs]),
        p99_gap_s=median([percentile_of(run.gaps_s, 99) for run in runs]),
        short_ttft_s=median([run.short_ttft_s for run in runs]),
        long_ttft_s=median([run.long_ttft_s for run in runs]),
        alone_s=median([run.alone_s for run in runs]),
        timeline=runs[0].timeline,
    )


def _table(result: Result) -> Table:
    table = Table(title=result.label or None, box=None, pad_edge=False, title_justify="left")
    for heading in (
        "prompt",
        "to",
        "usual gap",
        "longest gap",
        "p99 gap",
        "short's first",
        "long's first",
        "alone",
        "×",
    ):
        table.add_column(heading, justify="right")
    for cell in result.cells:
        figures = (
            *(cell.usual_gap_s, cell.longest_gap_s, cell.p99_gap_s),
            *(cell.short_ttft_s, cell.long_ttft_s, cell.alone_s),
        )
        table.add_row(
            *(str(cell.prompt_tokens), cell.to),
            *[f"{figure:.3f} s" for figure in figures],
            f"{cell.long_ttft_s / cell.alone_s:.2f}" if cell.alone_s else "-",
        )
    return table
