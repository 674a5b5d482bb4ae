"""Traces of conversations, whose prompts share their beginnings: Mooncake's, which MuxWise is evaluated with (§4.2).

A trace is a `.jsonl` file as Mooncake publishes it, each line with `input_length`, `output_length` and `hash_ids`, one
for each block of 512 tokens of the prompt, equal where prompts are equal up to there; or a `.csv` file with
`input_tokens` and `output_tokens`, and beside it one that is called `…_prefix512.csv`: a head, and in line i the blocks
of row i with blanks between. Each may be compressed with gzip.

What of a prompt is reused is what a cache holds: of a number of tokens, the least recently used leave first. Prompts
pass it in the order of the trace, whoever serves them.
"""

from __future__ import annotations

import csv
import json
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import cycle
from pathlib import Path
from typing import Final

from aegis.core.errors import UserError
from bench.workloads.arrival import Arrival
from bench.workloads.traces import opened, readable

BLOCK_TOKENS: Final = 512
_TOKENS_MAX: Final = 1 << 30
_PREFIXES: Final = f"_prefix{BLOCK_TOKENS}"

NAMES: Final = {
    "conversation": ("conversation_trace.jsonl", "mooncake_conversation.csv", "mooncake_conv.csv"),
    "tool-agent": ("toolagent_trace.jsonl", "mooncake_toolagent.csv"),
}
"""The names of the traces of MuxWise's tasks that have one."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """`blocks` are the names of its blocks of 512 tokens, the last one of which may be shorter."""

    input_tokens: int
    output_tokens: int
    blocks: tuple[str, ...]


def found(directory: Path, task: str) -> Path:
    """The trace of the task. Raises UserError if there is none."""
    for name in NAMES.get(task, ()):
        for file in (directory / name, directory / f"{name}.gz"):
            if file.is_file():
                return file
    raise UserError(f"--trace-dir {directory}: has no {' or '.join(NAMES.get(task, (task,)))}, compressed or not")


def replayed(arrivals: Iterable[Arrival], path: Path, cache_tokens: int | None = None) -> list[Arrival]:
    """The arrivals with the prompts of a trace, in its order; it begins again at its end. Raises UserError."""
    prompts = read(path)
    found = list(zip(arrivals, cycle(prompts), strict=False))
    reused = reused_tokens([prompt for _, prompt in found], cache_tokens)
    return [
        replace(arrival, input_tokens=prompt.input_tokens, output_tokens=prompt.output_tokens, reused_tokens=tokens)
        for (arrival, prompt), tokens in zip(found, reused, strict=True)
    ]


def reused_tokens(prompts: Iterable[Prompt], cache_tokens: int | None = None) -> Iterator[int]:
    """The length of the beginning of each that a cache of so many tokens still has; None: it keeps all."""
    kept: OrderedDict[str, None] = OrderedDict()
    room = None if cache_tokens is None else cache_tokens // BLOCK_TOKENS
    for prompt in prompts:
        hits = 0
        for block in prompt.blocks:
            if block not in kept:
                break
            hits += 1
        for block in reversed(prompt.blocks):  # its end leaves before its beginning
            kept[block] = None
            kept.move_to_end(block)
        while room is not None and len(kept) > room:
            kept.popitem(last=False)
        yield min(hits * BLOCK_TOKENS, prompt.input_tokens)


@lru_cache(4)
def read(path: Path) -> Sequence[Prompt]:
    """Raises UserError, with file and line where a row is at fault."""
    plain = path.with_suffix("") if path.suffix == ".gz" else path
    with readable(path):
        prompts = list(_csv(path) if plain.suffix == ".csv" else _jsonl(path))
    if not prompts:
        raise UserError(f"{path}: the trace holds no requests")
    return prompts


def _lines(path: Path) -> list[str]:
    with opened(path) as file:
        return file.read().splitlines()


def _jsonl(path: Path) -> Iterator[Prompt]:
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            blocks = row["hash_ids"]
            yield _prompt(row["input_length"], row["output_length"], [str(block) for block in blocks])
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            reason = f"lacks {error}" if isinstance(error, KeyError) else str(error)
            raise UserError(f"{path}:{number}: {reason}") from error


def _csv(path: Path) -> Iterator[Prompt]:
    name, _, kind = path.name.partition(".csv")
    beside = path.with_name(f"{name}{_PREFIXES}.csv{kind}")
    if not beside.is_file():
        raise UserError(f"{path}: the blocks of its prompts are not beside it, in {beside.name}")
    blocks = _lines(beside)[1:]
    rows = csv.DictReader(_lines(path))
    for number, row in enumerate(rows, 1):
        if number > len(blocks):
            raise UserError(f"{beside}: has {len(blocks)} rows, fewer than {path.name}")
        try:
            yield _prompt(int(row["input_tokens"]), int(row["output_tokens"]), blocks[number - 1].split())
        except (ValueError, TypeError, KeyError) as error:
            reason = f"lacks {error}" if isinstance(error, KeyError) else str(error)
            raise UserError(f"{path}:{number + 1}: {reason}") from error


def _prompt(input_tokens: int, output_tokens: int, blocks: Sequence[str]) -> Prompt:
    """Raises `ValueError` with what is wrong."""
    for tokens, least, name in ((input_tokens, 1, "input"), (output_tokens, 0, "output")):
        if type(tokens) is not int or not least <= tokens <= _TOKENS_MAX:
            raise ValueError(f"expected a whole number of {name} tokens, {least} or more, got {tokens!r:.40}")
    if len(blocks) > -(-input_tokens // BLOCK_TOKENS):
        raise ValueError(f"{len(blocks)} blocks for {input_tokens} tokens; each has {BLOCK_TOKENS}")
    return Prompt(input_tokens, max(output_tokens, 1), tuple(blocks))
