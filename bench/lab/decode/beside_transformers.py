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
from importlib.metadata import version
from pathlib import Path

import msgspec
import torch
from msgspec import Struct
from transformers import (
    DynamicCache,
    StoppingCriteria,
    StoppingCriteriaList,
)

from bench.common import result_files
from bench.common.machine import Machine, describe
from bench.lab.decode.engine_side import CHECKPOINTS, Side, build, write

_READ_BYTES = 512 << 20


class Plan(Struct, frozen=True, kw_only=True):
    """The measurements: every combination. Each run decodes `tokens` tokens per sequence after `context` others."""

    checkpoints: tuple[str, ...] = ("tiny", "50m")
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
    """Measures, prints a line per case, and writes the result as JSON where a path is given. Raises UserError."""
    result_files.prepare(json_path)
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
        result_files.write_json(json_path, result)
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
        self._names = (checkpoint, dtype)
        self._plan = plan
        self._theirs = build(checkpoint, dtype)
        with tempfile.TemporaryDirectory() as directory:
            spec = write(self._theirs, Path(directory))
            self._ours = Side(spec, rows=max(plan.batches), tokens=max(plan.contexts) + plan.tokens)

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
                weight_bytes_per_s=steps * self._ours.weight_bytes / our_s,
            )
            cases.append(case)
        return cases

    def _race(self, context: int, batch: int) -> tuple[float, float]:
        """Seconds that each side takes for all steps but the first, the median of several runs."""
        draws = torch.Generator().manual_seed(context)
        prompt = torch.randint(1, 4096, (context,), generator=draws).tolist()
        cache, rows = self._fill_theirs(prompt, batch), self._ours.fill(prompt, batch)
        ours, theirs = [], []
        for attempt in range(self._plan.runs + 1):
            our_s, our_tokens = self._ours.run(rows, context, self._plan.tokens)
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
