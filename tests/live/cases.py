"""64 requests over eight models, and what transformers' own greedy generate answers to each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from aegis.core.rng import Stream as Draws
from tests.checkpoints import VOCAB_SIZE
from tests.live.market import MARKET, Greedy, Reference
from tests.live.streams import Body

STREAMS_PER_MODEL = 8
PROMPT_TOKENS_MAX = 400
OUTPUT_TOKENS_MIN, OUTPUT_TOKENS_MAX = 16, 300
_WORDS = ["the", "cat", "and", "the", "hat", "sat", "on", "the", "mat", "then", "they", "ran", "and", "ran", "again"]


@dataclass(frozen=True, slots=True)
class Case:
    body: Body
    expected: Greedy


def draw_cases(references: Mapping[str, Reference]) -> list[Case]:
    """Eight for each model, which take turns."""
    return [_clear(model, n, references[model]) for n in range(STREAMS_PER_MODEL) for model in MARKET]


def _clear(model: str, number: int, reference: Reference) -> Case:
    """Drawn anew while transformers' own choice hangs on rounding."""
    for attempt in range(20):
        case = _draw(model, number, reference, Draws(0, "exactness", model, number, attempt))
        if case.expected.is_clear:
            return case
    raise AssertionError(f"{model} answers nothing clearly")


def _draw(model: str, number: int, reference: Reference, draws: Draws) -> Case:
    """Shortest and longest prompts and outputs are among the cases of every model; half of them ignore end tokens, the
    others end with one if it comes; one prompt in four is text."""
    lengths = {0: 1, 1: PROMPT_TOKENS_MAX}
    prompt_tokens = lengths.get(number, 1 + draws.below(PROMPT_TOKENS_MAX))
    max_tokens = OUTPUT_TOKENS_MIN + draws.below(OUTPUT_TOKENS_MAX - OUTPUT_TOKENS_MIN + 1)
    ends: Body = {"max_tokens": OUTPUT_TOKENS_MAX, "min_tokens": OUTPUT_TOKENS_MIN}
    if number % 2:
        ends = {"max_tokens": {1: OUTPUT_TOKENS_MIN, 3: OUTPUT_TOKENS_MAX}.get(number, max_tokens), "ignore_eos": True}
    prompt: str | list[int] = [draws.below(VOCAB_SIZE) for _ in range(prompt_tokens)]
    ids = prompt
    if number in (2, 5):
        prompt = " ".join(_WORDS[draws.below(len(_WORDS))] for _ in range(1 + prompt_tokens // 4))
        ids = reference.tokenizer(prompt).input_ids
    assert len(ids) <= PROMPT_TOKENS_MAX
    body = {"model": model, "prompt": prompt, "temperature": 0} | ends
    return Case(body, reference.greedy(ids, **ends))
