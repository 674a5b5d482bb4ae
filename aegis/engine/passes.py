"""Cuts a step into forward passes, so that its activations take no more memory however many tokens it has. Models
whose KV depends on the length of the prompt (`Engine.extends`) are not cut.

A pass of some hundred tokens keeps a core as busy as a longer one, a pass of some thousand a GPU. Activations of a
longer one would be the largest memory of an instance that nobody planned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from msgspec import structs

from aegis.engine.protocol import StepRow

PASS_TOKENS = {"cpu": 512, "cuda": 8192}
"""The most tokens of prompts in a pass, by the kind of device."""

REPORTED_BYTES = {"cpu": 64 << 20, "cuda": 512 << 20}
"""The most memory of the logits of a pass all of whose tokens are reported."""

_SHORTEST = 2  # a part of one token would pass for a row that decodes


class Part(NamedTuple):
    at: int  # the number of its row in the step
    row: StepRow


def passes(rows: Sequence[StepRow], most: int) -> Iterator[list[Part]]:
    """The rows in passes of at most `most` tokens of prompts. Only rows that are longer are cut, and sample with their
    last part. Rows of one token are in the first pass. `most` is 4 at least."""
    here = [Part(at, row) for at, row in enumerate(rows) if len(row.tokens) == 1]
    room = most
    for at, row in enumerate(rows):
        if len(row.tokens) == 1:
            continue
        for part in _parts(row, most):
            if len(part.tokens) > room:
                yield here
                here, room = [], most
            here.append(Part(at, part))
            room -= len(part.tokens)
    yield here


def _parts(row: StepRow, most: int) -> Iterator[StepRow]:
    tokens, begin = row.tokens, 0
    while len(tokens) - begin > most:
        end = min(begin + most, len(tokens) - _SHORTEST)
        yield structs.replace(row, tokens=tokens[begin:end], start=row.start + begin, samples=False)
        begin = end
    yield structs.replace(row, tokens=tokens[begin:], start=row.start + begin) if begin else row


def reported_tokens(vocabulary: int, device: str) -> int:
    """The most tokens of a pass all of which are reported, each by float32 logits of the vocabulary."""
    return max(min(REPORTED_BYTES[device] // (4 * vocabulary), PASS_TOKENS[device]), 2 * _SHORTEST)
