"""Decoding beside transformers' own `generate`: one process, one checkpoint, the same threads, the same dtype.

Both sides decode greedily, end tokens off, from prompts of one length (so that `generate` needs no padding) whose KV
is there when the clock starts: theirs in a `DynamicCache`, ours in blocks scattered over a region. Runs of the two
alternate and medians are reported. `weight_bytes_per_s` is what the steps of a run stream of the weights; beside it
stands what one pass over a large array reads on the same threads. In float32 the tokens of both sides must agree.

    python -m bench.decode --json results.json
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, StoppingCriteria, StoppingCriteriaList

from aegis.core.ids import BlockId, ModelId, RequestId
from aegis.core.model import TENSOR_ALIGNMENT_BYTES, KvLayer, KvShape, Manifest, ModelSpec, TensorEntry
from aegis.core.request import Sampling
from aegis.engine.base import KvRegion, Row
from aegis.engine.transformers_engine import TransformersEngine

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
SLAB_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to measure. `tokens` are decoded per run, after a context of `context` tokens."""

    checkpoints: tuple[str, ...] = tuple(CHECKPOINTS)
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    batches: tuple[int, ...] = (1, 8, 32)
    contexts: tuple[int, ...] = (128, 1000)
    tokens: int = 32
    runs: int = 5


def run(json_path: Path | None, plan: Plan = Plan()) -> dict[str, Any]:
    """Measures, prints a line per case, writes the results as JSON where a path is given."""
    results: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": _machine(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "threads": torch.get_num_threads(),
        "tokens_per_run": plan.tokens,
        "runs": plan.runs,
        "memory_read_bytes_per_s": read_bytes_per_s(),
        "cases": [],
    }
    print(f"memory read {results['memory_read_bytes_per_s'] / 1e9:.1f} GB/s on {results['threads']} thread(s)")
    print(
        f"{'checkpoint':10} {'dtype':9} {'context':>7} {'batch':>5} {'aegis tok/s':>12} {'theirs':>10} {'ratio':>6} {'÷batch 1':>8} {'weights GB/s':>12}"
    )
    for name in plan.checkpoints:
        for dtype in plan.dtypes:
            bench = Contest(CHECKPOINTS[name], getattr(torch, dtype), plan)
            for context in plan.contexts:
                alone = 0.0
                for batch in plan.batches:
                    case = {"checkpoint": name, "dtype": dtype, "context": context, "batch": batch}
                    case |= bench.measure(context, batch)
                    alone = alone or case["aegis_tokens_per_s"] / batch
                    case["times_one_sequence"] = case["aegis_tokens_per_s"] / alone
                    results["cases"].append(case)
                    print(
                        f"{name:10} {dtype:9} {context:7} {batch:5} {case['aegis_tokens_per_s']:12.1f} "
                        f"{case['transformers_tokens_per_s']:10.1f} {case['ratio']:6.2f} "
                        f"{case['times_one_sequence']:8.2f} {case['weight_bytes_per_s'] / 1e9:12.1f}",
                        flush=True,
                    )
    if json_path is not None:
        json_path.write_text(json.dumps(results, indent=1) + "\n")
    return results


def read_bytes_per_s(nbytes: int = 512 << 20) -> float:
    """One pass of a sum over memory larger than any cache, the best of five."""
    array = torch.ones(nbytes // 4)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        array.sum()
        best = min(best, time.perf_counter() - start)
    return nbytes / best


class Contest:
    """One checkpoint, held twice: as transformers' model, and as a weight image beneath the engine."""

    def __init__(self, config: LlamaConfig, dtype: torch.dtype, plan: Plan) -> None:
        torch.manual_seed(0)
        self._plan = plan
        self._theirs = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        self._shape = KvShape(
            (KvLayer(config.num_key_value_heads, config.head_dim, config.head_dim),) * config.num_hidden_layers,
            str(dtype).removeprefix("torch."),
            dtype.itemsize,
        )
        per_slab = SLAB_BYTES // self._shape.block_bytes
        blocks = max(plan.batches) * self._shape.blocks_for(max(plan.contexts) + plan.tokens)
        self._region = torch.zeros((-(-blocks // per_slab), SLAB_BYTES), dtype=torch.uint8)
        self._image, manifest = _image(self._theirs, config, self._shape)
        self._engine = TransformersEngine(KvRegion(self._region.data_ptr(), self._region.numel(), SLAB_BYTES))
        with tempfile.TemporaryDirectory() as directory:
            config.save_pretrained(directory)
            spec = ModelSpec(ModelId("contest"), manifest, directory, "", directory)
            self._engine.attach(spec, self._image.data_ptr())
        self._blocks = [BlockId(int(block)) for block in torch.randperm(self._region.shape[0] * per_slab)]

    def measure(self, context: int, batch: int) -> dict[str, float]:
        plan = self._plan
        prompt = torch.randint(1, 4096, (context,), generator=torch.Generator().manual_seed(context)).tolist()
        cache, rows = self._fill_theirs(prompt, batch), self._fill_ours(prompt, batch)
        ours, theirs = [], []
        for attempt in range(plan.runs + 1):  # the first warms up
            our_s, our_tokens = self._run_ours(rows, context)
            their_s, their_tokens = self._run_theirs(copy.deepcopy(cache), prompt, batch)
            if attempt:
                ours.append(our_s)
                theirs.append(their_s)
            if self._theirs.dtype == torch.float32:
                assert our_tokens == their_tokens, "the two sides disagree"
        steps = plan.tokens - 1
        our_s, their_s = statistics.median(ours), statistics.median(theirs)
        return {
            "aegis_tokens_per_s": batch * steps / our_s,
            "transformers_tokens_per_s": batch * steps / their_s,
            "ratio": their_s / our_s,
            "weight_bytes_per_s": steps * self._image.numel() / our_s,
        }

    def _fill_theirs(self, prompt: list[int], batch: int) -> DynamicCache:
        """The cache after all of the prompt but its last token, with which `generate` begins."""
        cache = DynamicCache(config=self._theirs.config)
        with torch.inference_mode():
            self._theirs(torch.tensor([prompt[:-1]]), past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache.batch_repeat_interleave(batch)
        return cache

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

    def _fill_ours(self, prompt: list[int], batch: int) -> list[tuple[int, list[BlockId]]]:
        """First token and blocks of each row: the first is prefilled, the others are copies."""
        count = self._shape.blocks_for(len(prompt) + self._plan.tokens)
        rows = []
        for row in range(batch):
            blocks = self._blocks[row * count : (row + 1) * count]
            if row == 0:
                self._start(row)
                first = self._engine.prefill(ModelId("contest"), RequestId(row), prompt, blocks).token.id
            for source, target in zip(self._blocks[:count], blocks, strict=True):
                self._bytes(target).copy_(self._bytes(source))
            rows.append((first, blocks))
        return rows

    def _bytes(self, block: BlockId) -> torch.Tensor:
        slab, index = divmod(block, SLAB_BYTES // self._shape.block_bytes)
        return self._region[slab].narrow(0, index * self._shape.block_bytes, self._shape.block_bytes)

    def _start(self, row: int) -> None:
        sampling = Sampling(max_tokens=self._plan.tokens, temperature=0.0)
        self._engine.start(RequestId(row), (), (), sampling)

    def _run_ours(self, rows: Sequence[tuple[int, list[BlockId]]], context: int) -> tuple[float, list[list[int]]]:
        out = [[first] for first, _ in rows]
        for row in range(len(rows)):
            self._start(row)
        start = time.perf_counter()
        for step in range(self._plan.tokens - 1):
            batch = [Row(RequestId(row), out[row][-1], context + step, blocks) for row, (_, blocks) in enumerate(rows)]
            for tokens, sampled in zip(out, self._engine.decode(ModelId("contest"), batch), strict=True):
                tokens.append(sampled.token.id)
        return time.perf_counter() - start, out


class _StopWatch(StoppingCriteria):  # type: ignore[misc]
    """Never stops; notes when each token was there. From the first to the last is decoding alone."""

    def __init__(self) -> None:
        self._times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self._times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    @property
    def elapsed_s(self) -> float:
        return self._times[-1] - self._times[0]


def _image(model: Any, config: LlamaConfig, shape: KvShape) -> tuple[torch.Tensor, Manifest]:
    held = [(n, t, False) for n, t in model.named_parameters()] + [(n, t, True) for n, t in model.named_buffers()]
    entries, offset = [], 0
    for name, tensor, buffer in held:
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries.append(TensorEntry((name,), dtype, tuple(tensor.shape), offset, tensor.nbytes, buffer))
        offset += -(-tensor.nbytes // TENSOR_ALIGNMENT_BYTES) * TENSOR_ALIGNMENT_BYTES
    image = torch.zeros(offset, dtype=torch.uint8)
    for entry, (_, tensor, _) in zip(entries, held, strict=True):
        image[entry.offset : entry.offset + entry.nbytes] = tensor.detach().reshape(-1).view(torch.uint8)
    manifest = Manifest(
        fingerprint="contest",
        architecture=type(model).__name__,
        dtype=shape.dtype,
        image_bytes=offset,
        tensors=tuple(entries),
        kv=shape,
        context_tokens=config.max_position_embeddings,
        vocab_size=config.vocab_size,
        eos_token_ids=(),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
    )
    return image, manifest


def _machine() -> str:
    cpu = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in cpu.read_text().splitlines() if line.startswith("model name")]
    return f"{platform.system()} {platform.machine()}, {len(names)} × {names[0] if names else 'unknown'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--checkpoints", nargs="+", default=tuple(CHECKPOINTS), choices=tuple(CHECKPOINTS))
    parser.add_argument("--dtypes", nargs="+", default=("float32", "bfloat16"))
    parser.add_argument("--batches", nargs="+", type=int, default=(1, 8, 32))
    parser.add_argument("--contexts", nargs="+", type=int, default=(128, 1000))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    plan = Plan(
        checkpoints=tuple(options.checkpoints),
        dtypes=tuple(options.dtypes),
        batches=tuple(options.batches),
        contexts=tuple(options.contexts),
    )
    run(options.json, plan)


if __name__ == "__main__":
    main()
