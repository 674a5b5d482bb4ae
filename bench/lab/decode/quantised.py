"""Quantised weights beside bfloat16: decoding, a prompt, the image's bytes and the time of a switch.

One random Llama of half a billion parameters in bfloat16, whose image is written dense, and with linear weights of 8
and 4 bits. Runs of the three alternate in one process, on the same threads; told are medians, and of ratios the median
of those of neighbouring runs, for a shared machine's pace changes meanwhile.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from msgspec import Struct
from rich.console import Console

from aegis.core.model import WeightsName
from aegis.device.cpu.pool import PAGE_BYTES
from bench.common import result_files
from bench.common.figures import Figure, at_least, at_most
from bench.common.machine import Machine, describe
from bench.lab.decode.engine_side import HALF_BILLION, Side, build, write
from bench.lab.switching import TwoModels

BATCHES = (1, 8, 32)
KINDS: tuple[WeightsName, ...] = ("dense", "int8", "int4")

_TOKENS_PER_S_MIN: Mapping[tuple[str, int], float] = {
    ("int8", 1): 1.4,
    ("int8", 8): 1.0,
    ("int8", 32): 0.85,
    ("int4", 1): 2.5,
    ("int4", 8): 1.0,
    ("int4", 32): 0.85,
}
_PREFILL_MIN = 0.85
_BYTES_MAX = {"int8": 0.55, "int4": 0.30}
_IN_PROPORTION = 1.15


class Plan(Struct, frozen=True, kw_only=True):
    """Each run decodes `tokens` tokens per sequence after `context` others, or runs a prompt of `prompt` tokens."""

    checkpoint: str = HALF_BILLION
    batches: tuple[int, ...] = BATCHES
    context: int = 64
    tokens: int = 9
    prompt: int = 512
    runs: int = 5
    switches: int = 5
    threads: int = 1


class Kind(Struct, frozen=True):
    """Tokens per second for each batch, in order, and of the prompt; the image, and a switch to it."""

    weights: WeightsName
    tokens_per_s: tuple[float, ...]
    prompt_tokens_per_s: float
    image_bytes: int
    switch_ms: float


class Result(Struct, frozen=True):
    machine: Machine
    plan: Plan
    kinds: tuple[Kind, ...]
    figures: tuple[Figure, ...]


Sides = Mapping[WeightsName, Side]
Seconds = Mapping[WeightsName, list[float]]


def run(json_path: Path | None = None, plan: Plan | None = None) -> Result:
    """Measures, prints the figures and writes all to `json_path`. Raises UserError."""
    plan = plan or Plan()
    if json_path:
        result_files.check(json_path)
    torch.set_num_threads(plan.threads)
    with tempfile.TemporaryDirectory(prefix="aegis-quantised-") as directory:
        sides = _sides(plan, Path(directory))
    decoding = [_decoding(sides, plan, batch) for batch in plan.batches]
    prompt = _in_turns({kind: _prompt_of(side, plan) for kind, side in sides.items()}, plan.runs)
    image_bytes = {kind: side.weight_bytes for kind, side in sides.items()}
    del sides
    gc.collect()
    switch_s = {kind: _switch_s(nbytes, plan.switches) for kind, nbytes in image_bytes.items()}
    kinds = tuple(
        Kind(
            kind,
            tuple(
                batch * (plan.tokens - 1) / statistics.median(seconds[kind])
                for batch, seconds in zip(plan.batches, decoding, strict=True)
            ),
            plan.prompt / statistics.median(prompt[kind]),
            image_bytes[kind],
            switch_s[kind] * 1e3,
        )
        for kind in KINDS
    )
    figures = [figure for kind in KINDS[1:] for figure in _figures(kind, plan, decoding, prompt, image_bytes, switch_s)]
    result = Result(describe(), plan, kinds, tuple(figures))
    _print(result)
    if json_path:
        result_files.write_json(json_path, result)
    return result


def _sides(plan: Plan, directory: Path) -> Sides:
    model = build(plan.checkpoint, "bfloat16")
    tokens = max(plan.prompt, plan.context + plan.tokens)
    specs = {kind: write(model, directory, weights=kind) for kind in KINDS}
    return {kind: Side(spec, rows=max(plan.batches), tokens=tokens) for kind, spec in specs.items()}


def _decoding(sides: Sides, plan: Plan, batch: int) -> Seconds:
    prompt = list(range(1, plan.context + 1))
    rows = {kind: side.fill(prompt, batch) for kind, side in sides.items()}

    def run_of(kind: WeightsName) -> Callable[[], float]:
        return lambda: sides[kind].run(rows[kind], plan.context, plan.tokens)[0]

    return _in_turns({kind: run_of(kind) for kind in sides}, plan.runs)


def _prompt_of(side: Side, plan: Plan) -> Callable[[], float]:
    prompt = list(range(1, plan.prompt + 1))

    def run_prompt() -> float:
        start = time.perf_counter()
        side.prefill(prompt, 0)
        return time.perf_counter() - start

    return run_prompt


def _in_turns(timed: Mapping[WeightsName, Callable[[], float]], runs: int) -> Seconds:
    """After one run of each that warms up."""
    for each in timed.values():
        each()
    seconds: dict[WeightsName, list[float]] = {kind: [] for kind in timed}
    for _ in range(runs):
        for kind, each in timed.items():
            seconds[kind].append(each())
    return seconds


def _switch_s(nbytes: int, switches: int) -> float:
    """The seconds of a switch to an image of so many bytes, into memory that another one had."""
    pages = -(-nbytes // PAGE_BYTES)
    models = TwoModels(pages * PAGE_BYTES, pages=pages)
    models.switch_to(0)
    durations_s = []
    for turn in range(switches):
        start = time.perf_counter()
        models.switch_to((turn + 1) % 2)
        durations_s.append(time.perf_counter() - start)
    models.close()
    return statistics.median(durations_s)


def _figures(
    kind: WeightsName,
    plan: Plan,
    decoding: list[Seconds],
    prompt: Seconds,
    image_bytes: Mapping[WeightsName, int],
    switch_s: Mapping[WeightsName, float],
) -> list[Figure]:
    found = []
    for batch, seconds in zip(plan.batches, decoding, strict=True):
        name = f"{kind}: tokens/s over bfloat16's, batch {batch}"
        found.append(at_least(name, _ratio(seconds, kind), "×", _TOKENS_PER_S_MIN.get((kind, batch), 0.85)))
    found.append(at_least(f"{kind}: the same, prompt of {plan.prompt}", _ratio(prompt, kind), "×", _PREFILL_MIN))
    share = image_bytes[kind] / image_bytes["dense"]
    found.append(at_most(f"{kind}: bytes of the image over bfloat16's", share, "×", _BYTES_MAX[kind]))
    switch = switch_s[kind] / switch_s["dense"]
    return [*found, at_most(f"{kind}: time of a switch over bfloat16's", switch, "×", share * _IN_PROPORTION)]


def _ratio(seconds: Seconds, kind: WeightsName) -> float:
    return statistics.median(dense / own for dense, own in zip(seconds["dense"], seconds[kind], strict=True))


def _print(result: Result) -> None:
    console = Console(markup=False, highlight=False)
    for kind in result.kinds:
        rates = ", ".join(
            f"{rate:.1f} at batch {batch}" for batch, rate in zip(result.plan.batches, kind.tokens_per_s, strict=True)
        )
        console.print(
            f"{kind.weights:6} tokens/s: {rates}, prompt {kind.prompt_tokens_per_s:.0f}; "
            f"{kind.image_bytes / (1 << 20):.0f} MiB, switched to in {kind.switch_ms:.1f} ms"
        )
    for figure in result.figures:
        verdict = "" if figure.ok is None else "ok" if figure.ok else "missed"
        console.print(f"{figure.name:50} {figure.value:8.3f} {figure.unit} {figure.wanted:8} {verdict}".rstrip())
