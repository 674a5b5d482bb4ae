"""Decoding beside transformers' own `generate`: one process, one checkpoint, the same threads, the same dtype.

Both sides decode greedily, end tokens off, from prompts of one length (so that `generate` needs no padding) whose KV
is there when the clock starts: theirs in a `DynamicCache`, ours in blocks scattered over a region. Runs of the two
alternate and medians are taken, so that a machine whose speed drifts does not spoil the ratio. `weight_bytes_per_s` is
what the steps stream of the weights; `memory_read_bytes_per_s`, one pass over a large array, is the roof over it. In
float32 the two sides must produce the same tokens.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from msgspec import Struct
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

from aegis.core.ids import ModelId, RequestId
from aegis.core.model import ModelSpec
from aegis.core.request import Sampling
from aegis.engine.base import KvRegion, Row
from aegis.engine.block_table import BlockTable
from aegis.engine.transformers_engine import TransformersEngine
from aegis.models.image import write_image
from aegis.models.image_directory import IMAGE
from aegis.models.probe import probe
from bench.machine import Machine, describe

_COMMON = {"vocab_size": 4096, "max_position_embeddings": 4096, "tie_word_embeddings": False}
CHECKPOINTS = {
    "tiny": LlamaConfig(
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        **_COMMON,
    ),
    "50m": LlamaConfig(
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=12,
        num_key_value_heads=4,
        **_COMMON,
    ),
}
_MODEL = ModelId("contest")
_SLAB_BYTES = 8 << 20
_READ_BYTES = 512 << 20


class Plan(Struct, frozen=True, kw_only=True):
    """What to measure: every combination. Each run decodes `tokens` tokens per sequence after `context` others."""

    checkpoints: tuple[str, ...] = tuple(CHECKPOINTS)
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    contexts: tuple[int, ...] = (128, 1000)
    batches: tuple[int, ...] = (1, 8, 32)
    tokens: int = 33
    runs: int = 3
    threads: int = 1


class Case(Struct, frozen=True):
    """`times_one_sequence` compares with the smallest batch of the same checkpoint, dtype and context."""

    checkpoint: str
    dtype: str
    context: int
    batch: int
    aegis_tokens_per_s: float
    transformers_tokens_per_s: float
    ratio: float
    times_one_sequence: float
    weight_bytes_per_s: float


class Result(Struct, frozen=True):
    machine: Machine
    transformers: str
    plan: Plan
    memory_read_bytes_per_s: float
    cases: tuple[Case, ...]


def run(json_path: Path | None = None, plan: Plan | None = None) -> Result:
    """Measures, prints a line per case, and writes the result as JSON where a path is given."""
    plan = plan or Plan()
    torch.set_num_threads(plan.threads)
    read_bytes_per_s = _read_bytes_per_s()
    print(f"memory read: {read_bytes_per_s / 1e9:.1f} GB/s, {plan.threads} thread(s)")
    print(
        f"{'checkpoint':10} {'dtype':8} {'context':>7} {'batch':>5} {'aegis':>9} {'transformers':>12}  ratio  ÷batch 1"
    )
    cases = []
    for checkpoint in plan.checkpoints:
        for dtype in plan.dtypes:
            contest = Contest(checkpoint, dtype, plan)
            for context in plan.contexts:
                for case in contest.measure(context):
                    cases.append(case)
                    print(_line(case), flush=True)
    result = Result(describe(), version("transformers"), plan, read_bytes_per_s, tuple(cases))
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    return result


def _line(case: Case) -> str:
    return (
        f"{case.checkpoint:10} {case.dtype:8} {case.context:7} {case.batch:5} {case.aegis_tokens_per_s:9.1f} "
        f"{case.transformers_tokens_per_s:12.1f} {case.ratio:6.2f} {case.times_one_sequence:9.2f}"
    )


def _read_bytes_per_s() -> float:
    """One pass of a sum over memory larger than any cache, the best of five."""
    array = torch.ones(_READ_BYTES // 4)
    durations_s = []
    for _ in range(5):
        start = time.perf_counter()
        array.sum()
        durations_s.append(time.perf_counter() - start)
    return _READ_BYTES / min(durations_s)


class Contest:
    """One checkpoint, held twice: as transformers' model, and as a weight image beneath the engine."""

    def __init__(self, checkpoint: str, dtype: str, plan: Plan) -> None:
        config = CHECKPOINTS[checkpoint]
        torch.manual_seed(0)
        self._names = (checkpoint, dtype)
        self._plan = plan
        self._theirs = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
        with tempfile.TemporaryDirectory() as directory:
            spec = _write(self._theirs, config, Path(directory))
            self._image = np.fromfile(spec.image_path, dtype=np.uint8)
            self._shape = spec.manifest.kv
            self._per_slab = _SLAB_BYTES // self._shape.block_bytes
            blocks = max(plan.batches) * self._shape.blocks_for(max(plan.contexts) + plan.tokens)
            self._slabs = np.zeros((-(-blocks // self._per_slab), _SLAB_BYTES), dtype=np.uint8)
            self._engine = TransformersEngine(KvRegion(self._slabs.ctypes.data, self._slabs.nbytes, _SLAB_BYTES))
            self._engine.attach(spec, self._image.ctypes.data)
        scattered = torch.randperm(len(self._slabs) * self._per_slab)
        self._blocks: BlockTable = scattered.numpy()

    def measure(self, context: int) -> list[Case]:
        cases: list[Case] = []
        steps = self._plan.tokens - 1
        for batch in self._plan.batches:
            our_s, their_s = self._race(context, batch)
            rate = batch * steps / our_s
            base = cases[0] if cases else None
            case = Case(
                *self._names,
                context=context,
                batch=batch,
                aegis_tokens_per_s=rate,
                transformers_tokens_per_s=batch * steps / their_s,
                ratio=their_s / our_s,
                times_one_sequence=rate / base.aegis_tokens_per_s if base else 1.0,
                weight_bytes_per_s=steps * self._image.nbytes / our_s,
            )
            cases.append(case)
        return cases

    def _race(self, context: int, batch: int) -> tuple[float, float]:
        """Seconds that each side takes for all steps but the first, the median of several runs."""
        draws = torch.Generator().manual_seed(context)
        prompt = torch.randint(1, 4096, (context,), generator=draws).tolist()
        cache, rows = self._fill_theirs(prompt, batch), self._fill_ours(prompt, batch)
        ours, theirs = [], []
        for attempt in range(self._plan.runs + 1):
            our_s, our_tokens = self._run_ours(rows, context)
            their_s, their_tokens = self._run_theirs(copy.deepcopy(cache), prompt, batch)
            if self._theirs.dtype == torch.float32:
                assert our_tokens == their_tokens, "the two sides disagree"
            if attempt > 0:  # the first warms up
                ours.append(our_s)
                theirs.append(their_s)
        return statistics.median(ours), statistics.median(theirs)

    @torch.inference_mode()
    def _fill_theirs(self, prompt: list[int], batch: int) -> DynamicCache:
        """The cache after all of the prompt but its last token, with which `generate` begins."""
        cache = DynamicCache(config=self._theirs.config)
        self._theirs(torch.tensor([prompt[:-1]]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache.batch_repeat_interleave(batch)
        return cache

    def _fill_ours(self, prompt: list[int], batch: int) -> list[tuple[int, BlockTable]]:
        """First token and blocks of each row: one is prefilled, the others are copies."""
        count = self._shape.blocks_for(len(prompt) + self._plan.tokens)
        rows = [self._blocks[row * count : (row + 1) * count] for row in range(batch)]
        self._start(0)
        first = self._engine.prefill(_MODEL, RequestId(0), prompt, rows[0]).token.id
        for row in rows[1:]:
            for source, target in zip(rows[0], row, strict=True):
                self._bytes(target)[:] = self._bytes(source)
        return [(first, row) for row in rows]

    def _bytes(self, block: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        slab, index = divmod(block, self._per_slab)
        return self._slabs[slab, index * self._shape.block_bytes :][: self._shape.block_bytes]

    def _start(self, row: int) -> None:
        self._engine.start(RequestId(row), (), (), Sampling(max_tokens=self._plan.tokens, temperature=0.0))

    def _run_ours(self, rows: Sequence[tuple[int, BlockTable]], context: int) -> tuple[float, list[list[int]]]:
        out = [[first] for first, _ in rows]
        for row in range(len(rows)):
            self._start(row)
        start = time.perf_counter()
        for step in range(self._plan.tokens - 1):
            batch = [Row(RequestId(row), out[row][-1], context + step, blocks) for row, (_, blocks) in enumerate(rows)]
            for tokens, sampled in zip(out, self._engine.decode(_MODEL, batch), strict=True):
                tokens.append(sampled.token.id)
        return time.perf_counter() - start, out

    def _run_theirs(self, cache: DynamicCache, prompt: list[int], batch: int) -> tuple[float, list[list[int]]]:
        watch = _StopWatch()
        out = self._theirs.generate(
            torch.tensor([prompt] * batch),
            past_key_values=cache,
            max_new_tokens=self._plan.tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([watch]),
        )
        return watch.elapsed_s, out[:, len(prompt) :].tolist()


class _StopWatch(StoppingCriteria):  # type: ignore[misc]
    """Stops nothing; notes when each token was there. From the first to the last is decoding alone."""

    def __init__(self) -> None:
        self._times_s: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        self._times_s.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    @property
    def elapsed_s(self) -> float:
        return self._times_s[-1] - self._times_s[0]


def _write(model: PreTrainedModel, config: LlamaConfig, directory: Path) -> ModelSpec:
    """The model as an image directory, as the registry makes it."""
    config.save_pretrained(directory)
    into = directory / "image"
    into.mkdir()
    manifest = write_image(model, probe(model), "contest", directory, into)
    return ModelSpec(_MODEL, manifest, str(into), str(into / IMAGE), str(directory))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--checkpoints", nargs="+", default=Plan().checkpoints, choices=tuple(CHECKPOINTS))
    parser.add_argument("--dtypes", nargs="+", default=Plan().dtypes)
    parser.add_argument("--contexts", nargs="+", type=int, default=Plan().contexts)
    parser.add_argument("--batches", nargs="+", type=int, default=Plan().batches)
    parser.add_argument("--threads", type=int, default=Plan().threads)
    options = vars(parser.parse_args())
    run(options.pop("json"), msgspec.convert(options, Plan))


if __name__ == "__main__":
    main()
