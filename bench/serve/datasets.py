"""The data sets of `vllm bench serve` that are files or chance: what is asked, not when."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from aegis.config.paths import refuse_device
from aegis.core.errors import UserError
from aegis.core.rng import Stream
from bench.workloads.traces import opened, readable

_CHARACTERS_PER_TOKEN = 4  # of English text, about
_LENGTH_MIN, _PROMPT_TOKENS_MAX, _TOKENS_MAX = 4, 1024, 2048  # the bounds that vLLM sets on ShareGPT
_BURSTGPT_MODEL = "GPT-4"  # the part of BurstGPT that vLLM uses


@dataclass(frozen=True, slots=True)
class Sample:
    """A request without its time. `model`: where the row names one. With a `text`, the input tokens are an estimate."""

    input_tokens: int
    output_tokens: int
    text: str | None = None
    model: str | None = None


@dataclass(frozen=True, slots=True)
class Dataset:
    """`random_range_ratio` r: lengths are drawn evenly from `[n(1 - r), n(1 + r)]`."""

    name: str = "random"
    path: Path | None = None
    random_input_len: int = 1024
    random_output_len: int = 128
    random_range_ratio: float = 0.0
    sharegpt_output_len: int | None = None
    custom_output_len: int = 256

    def samples(self, count: int, seed: int) -> list[Sample]:
        """`count` of them; a file with fewer is gone through again. Raises UserError."""
        draws = Stream(seed, "dataset", self.name)
        if self.name == "random":
            return [self._random(draws) for _ in range(count)]
        if self.path is None:
            raise UserError(f"--dataset-name {self.name} needs --dataset-path FILE")
        read = {"sharegpt": self._sharegpt, "burstgpt": _burstgpt, "custom": self._custom}[self.name]
        with readable(self.path):
            rows = list(read(self.path))
        if not rows:
            raise UserError(f"--dataset-path {self.path}: has no usable row of {self.name}")
        if self.name != "custom":
            _shuffle(rows, draws)
        return [rows[index % len(rows)] for index in range(count)]

    def _random(self, draws: Stream) -> Sample:
        return Sample(self._length(self.random_input_len, draws), self._length(self.random_output_len, draws))

    def _length(self, mean: int, draws: Stream) -> int:
        spread = int(mean * self.random_range_ratio)
        return max(mean - spread + draws.below(2 * spread + 1), 1)

    def _sharegpt(self, path: Path) -> Iterator[Sample]:
        """The first two turns of each conversation, without those too short or too long to compare."""
        refuse_device(path)
        try:
            conversations = msgspec.json.decode(path.read_bytes(), type=list[_Conversation])
        except msgspec.DecodeError as error:
            raise UserError(f"{path}: {error}") from None
        for conversation in conversations:
            if len(conversation.conversations) < 2:
                continue
            prompt, answer = (turn.value for turn in conversation.conversations[:2])
            asked, made = estimate_tokens(prompt), self.sharegpt_output_len or estimate_tokens(answer)
            long_enough = asked >= _LENGTH_MIN and (self.sharegpt_output_len or made >= _LENGTH_MIN)
            if long_enough and asked <= _PROMPT_TOKENS_MAX and asked + made <= _TOKENS_MAX:
                yield Sample(asked, made, prompt)

    def _custom(self, path: Path) -> Iterator[Sample]:
        with opened(path) as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    row = msgspec.json.decode(line, type=_Row)
                except msgspec.DecodeError as error:
                    raise UserError(f"{path}:{number}: {error}") from None
                made = row.output_tokens or self.custom_output_len
                yield Sample(estimate_tokens(row.prompt), made, row.prompt, row.model)


class _Turn(Struct, frozen=True):
    value: str


class _Conversation(Struct, frozen=True):
    conversations: list[_Turn] = []


class _Row(Struct, frozen=True):
    prompt: Annotated[str, Meta(min_length=1)]
    output_tokens: Annotated[int, Meta(ge=1)] | None = None
    model: str | None = None


def estimate_tokens(text: str) -> int:
    return max(len(text) // _CHARACTERS_PER_TOKEN, 1)


def _burstgpt(path: Path) -> Iterator[Sample]:
    """Lengths only: the times of these requests are drawn like those of any data set."""
    with opened(path) as file:
        rows = csv.DictReader(file)
        try:
            for row in rows:
                model, asked, made = _burstgpt_row(row, f"{path}:{rows.line_num}")
                if model == _BURSTGPT_MODEL and asked > 0 and made > 0:
                    yield Sample(asked, made)
        except csv.Error as error:
            raise UserError(f"{path}:{rows.line_num}: {error}") from None


def _burstgpt_row(row: Mapping[str, str], where: str) -> tuple[str, int, int]:
    try:
        return row["Model"], int(row["Request tokens"]), int(row["Response tokens"])
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{where}: has no 'Model', 'Request tokens', 'Response tokens'") from None


def _shuffle(rows: list[Sample], draws: Stream) -> None:
    """Fisher and Yates's."""
    for last in range(len(rows) - 1, 0, -1):
        other = draws.below(last + 1)
        rows[last], rows[other] = rows[other], rows[last]
