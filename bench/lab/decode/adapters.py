"""Steps in which each row has a LoRA adapter of its own, beside the same rows of their base alone.

One random Llama in bfloat16 with random adapters of its attention. Runs of both alternate in one process, on the same
threads; told are medians, and of the ratio the median of those of neighbouring runs, for a shared machine's pace
changes meanwhile.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

import torch
from msgspec import Struct
from rich.console import Console

from aegis.core.ids import ModelId
from aegis.core.model import ModelSpec, image_name
from aegis.engine.lora import layer_shape
from aegis.models.adapters.configuration import AdapterConfiguration
from aegis.models.adapters.image import Pairs, write_pairs
from bench.common import result_files
from bench.common.figures import Figure, at_least, at_most
from bench.common.machine import Machine, describe
from bench.lab.decode.engine_side import HALF_BILLION, Side, build, write

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
_THROUGHPUT_MIN = 0.8
_BYTES_MAX = 0.02


class Plan(Struct, frozen=True, kw_only=True):
    """Each run decodes `tokens` tokens in as many rows as there are adapters, after `context` others."""

    checkpoint: str = HALF_BILLION
    adapters: int = 16
    rank: int = 8
    context: int = 64
    tokens: int = 9
    runs: int = 7
    threads: int = 1


class Result(Struct, frozen=True):
    machine: Machine
    plan: Plan
    base_tokens_per_s: float
    adapters_tokens_per_s: float
    base_bytes: int
    adapter_bytes: int
    figures: tuple[Figure, ...]


def run(json_path: Path | None = None, plan: Plan | None = None) -> Result:
    """Measures, prints the figures and writes all to `json_path`. Raises UserError."""
    plan = plan or Plan()
    if json_path:
        result_files.check(json_path)
    torch.set_num_threads(plan.threads)
    with tempfile.TemporaryDirectory(prefix="aegis-lora-") as directory:
        side, specs = _side(plan, Path(directory))
    base_s, adapters_s = _runs(side, [spec.model for spec in specs], plan)
    made = plan.adapters * (plan.tokens - 1)
    ratio = statistics.median(base / own for base, own in zip(base_s, adapters_s, strict=True))
    share = specs[0].manifest.image_bytes / side.weight_bytes
    figures = (
        at_least(f"tokens/s of {plan.adapters} adapters over the base's", ratio, "×", _THROUGHPUT_MIN),
        at_most("bytes of an adapter over the base's", share, "×", _BYTES_MAX),
    )
    result = Result(
        describe(),
        plan,
        made / statistics.median(base_s),
        made / statistics.median(adapters_s),
        side.weight_bytes,
        specs[0].manifest.image_bytes,
        figures,
    )
    _print(result)
    if json_path:
        result_files.write_json(json_path, result)
    return result


def _side(plan: Plan, directory: Path) -> tuple[Side, list[ModelSpec]]:
    model = build(plan.checkpoint, "bfloat16")
    base = write(model, directory)
    side = Side(base, rows=plan.adapters, tokens=plan.context + plan.tokens)
    configuration = AdapterConfiguration(plan.rank, 1.0, "")
    specs = []
    for number in range(plan.adapters):
        into = directory / f"adapter-{number}"
        into.mkdir()
        manifest = write_pairs(_pairs(model, plan.rank), configuration, base.manifest, into.name, into)
        image = str(into / image_name())
        specs.append(ModelSpec(ModelId(into.name), manifest, str(into), image, str(into), base=base.model))
        side.add_adapter(specs[-1])
    return side, specs


def _pairs(model: torch.nn.Module, rank: int) -> Pairs:
    pairs: Pairs = {}
    for path, layer in model.named_modules():
        shape = layer_shape(layer)
        if shape is not None and path.rpartition(".")[2] in TARGETS:
            outputs, inputs = shape
            down, up = torch.randn(rank, inputs) * 0.02, torch.randn(outputs, rank) * 0.02
            pairs[path] = {"A": down.bfloat16(), "B": up.bfloat16()}
    return pairs


def _runs(side: Side, adapters: list[ModelId], plan: Plan) -> tuple[list[float], list[float]]:
    """Seconds of the base's runs and of the adapters', after one of each that warms up."""
    rows = side.fill(list(range(1, plan.context + 1)), plan.adapters)
    base_s, adapters_s = list[float](), list[float]()
    for turn in range(plan.runs + 1):
        for wanted, seconds in (([], base_s), (adapters, adapters_s)):
            side.adapt(wanted)
            took_s, _ = side.run(rows, plan.context, plan.tokens)
            if turn:
                seconds.append(took_s)
    return base_s, adapters_s


def _print(result: Result) -> None:
    console = Console(markup=False, highlight=False)
    console.print(
        f"base {result.base_tokens_per_s:.1f} tokens/s, {result.plan.adapters} adapters of rank {result.plan.rank} "
        f"{result.adapters_tokens_per_s:.1f}; {result.base_bytes / (1 << 20):.0f} MiB, an adapter "
        f"{result.adapter_bytes / (1 << 20):.1f} MiB"
    )
    for figure in result.figures:
        verdict = "" if figure.ok is None else "ok" if figure.ok else "missed"
        console.print(f"{figure.name:50} {figure.value:8.3f} {figure.unit} {figure.wanted:8} {verdict}".rstrip())
