"""64 streams over eight models of which two fit: every token is what transformers' own greedy generate returns."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from aegis.core.rng import Stream as Draws
from tests.checkpoints import VOCAB_SIZE
from tests.live.market import MARKET, Greedy, Reference
from tests.live.server import Server
from tests.live.streams import Body, run_all

STREAMS_PER_MODEL = 8
PROMPT_TOKENS_MAX = 400
OUTPUT_TOKENS_MIN, OUTPUT_TOKENS_MAX = 16, 300
MARGIN_MIN = 3e-5  # some ten times what rounding makes of a batch of another size
SWITCHES_MIN = PREEMPTIONS_MIN = 50
FIGURES = (
    "model_switches_total",
    "num_preemptions_total",
    "request_replays_total",
    "instance_prefetches_total",
    "instance_steps_total",
    "instance_given_up_total",
)
_WORDS = ["the", "cat", "and", "the", "hat", "sat", "on", "the", "mat", "then", "they", "ran", "and", "ran", "again"]


@dataclass(frozen=True, slots=True)
class Case:
    body: Body
    expected: Greedy


def clear_case(model: str, number: int, reference: Reference) -> Case:
    """Drawn anew while transformers' own choice hangs on rounding."""
    for attempt in range(20):
        case = _draw(model, number, reference, Draws(0, "exactness", model, number, attempt))
        if case.expected.margin > MARGIN_MIN:
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


def test_64_streams_over_eight_models_are_what_transformers_generates(
    server: Server, references: dict[str, Reference], record_property: Callable[[str, object], None]
) -> None:
    cases = [clear_case(model, n, references[model]) for n in range(STREAMS_PER_MODEL) for model in MARKET]
    before = server.metrics()
    started_s = time.monotonic()
    streams = run_all(server.url, [case.body for case in cases])
    duration_s = time.monotonic() - started_s
    after = server.wait_for_freed_memory()
    for case, stream in zip(cases, streams, strict=True):
        assert stream.error is None
        assert stream.tokens == case.expected.tokens, case.body
        assert stream.done
    seen = {name: after.total(name) - before.total(name) for name in FIGURES}
    seen |= {"kv_swap_" + d: after.total("kv_swap_bytes_total", direction=d) for d in ("in", "out")}
    seen |= {"seconds": round(duration_s, 1), "tokens": sum(len(stream.tokens) for stream in streams)}
    for name, figure in seen.items():
        record_property(name, figure)
    assert seen["model_switches_total"] >= SWITCHES_MIN
    assert seen["num_preemptions_total"] >= PREEMPTIONS_MIN
    for instance in after.instances():
        assert after.total("engine_initialisations_total", instance=instance) == 1
