"""Decoding, and replacing one model by another, beside stock vLLM: same checkpoints, dtype and threads.

Stock vLLM runs in a process of its own (`stock_vllm`), with its defaults; our loop runs here, once for each engine.
Runs of the sides alternate; told are the median of each, and of the ratios of runs that follow each other, for a shared
machine's pace changes meanwhile. A run of vLLM's is timed from the step after which all sequences have
a token to the last; KV of the prompt is there then, as it is when ours begins. In float32 all sides must produce the
same tokens.

Replacing stock vLLM's model is ending its process and starting one, until the first token of a short prompt; ours is
the copy of the other model's image into weight memory, and the same first token.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import msgspec
import numpy as np
import torch
from msgspec import Struct

from aegis.core.errors import UserError
from aegis.core.model import EngineName
from aegis.engine.vllm.version import installed, refusal
from bench.common import result_files
from bench.common.machine import Machine, describe
from bench.lab.decode.engine_side import Side, build, write
from bench.lab.decode.stock_vllm import Answer, DecodeRequest

_REPLACED = 9  # times
_SHORT = (5, 6, 7, 8)


class Plan(Struct, frozen=True, kw_only=True):
    """Every dtype with every batch; each run decodes `tokens` tokens per sequence after `context` others."""

    engines: tuple[EngineName, ...] = ("vllm", "transformers")
    checkpoint: str = "50m"
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    batches: tuple[int, ...] = (1, 8, 32)
    context: int = 128
    tokens: int = 65
    runs: int = 5
    threads: int = 1


class Case(Struct, frozen=True):
    dtype: str
    engine: EngineName
    batch: int
    aegis_tokens_per_s: float
    vllm_tokens_per_s: float
    ratio: float


class Replacement(Struct, frozen=True):
    """Seconds from one model's last token to another's first."""

    dtype: str
    engine: EngineName
    image_bytes: int
    aegis_s: float
    vllm_s: float
    ratio: float


class Result(Struct, frozen=True):
    machine: Machine
    vllm: str
    transformers: str
    plan: Plan
    cases: tuple[Case, ...]
    replacements: tuple[Replacement, ...]


def run(json_path: Path | None = None, plan: Plan | None = None) -> Result:
    """Measures, prints a line per figure, and writes the result as JSON where a path is given. Raises UserError."""
    result_files.prepare(json_path)
    plan = plan or Plan()
    if reason := refusal():
        raise UserError(reason, param="peer")
    torch.set_num_threads(plan.threads)
    cases: list[Case] = []
    replacements: list[Replacement] = []
    print(f"{'dtype':8} {'engine':12} {'batch':>5} {'aegis':>9} {'vllm':>9}  ratio   (tokens/s)")
    for dtype in plan.dtypes:
        with tempfile.TemporaryDirectory() as directory:
            contest = _Contest(plan, dtype, Path(directory))
            for case in contest.decode():
                cases.append(case)
                print(_line(case), flush=True)
            for replacement in contest.replace():
                replacements.append(replacement)
                print(_said(replacement), flush=True)
    found = (installed() or "", version("transformers"))
    result = Result(describe(), *found, plan, tuple(cases), tuple(replacements))
    if json_path is not None:
        result_files.write_json(json_path, result)
    return result


def _line(case: Case) -> str:
    rates = f"{case.aegis_tokens_per_s:9.1f} {case.vllm_tokens_per_s:9.1f}"
    return f"{case.dtype:8} {case.engine:12} {case.batch:5} {rates} {case.ratio:6.2f}"


def _said(done: Replacement) -> str:
    sides = f"{done.aegis_s * 1e3:.1f} ms for {done.image_bytes / 1e6:.0f} MB, stock vLLM {done.vllm_s:.1f} s"
    return f"{done.dtype:8} {done.engine:12} replaced: {sides}: {done.ratio:.0f} times"


class _Contest:
    """Two checkpoints of one shape in one dtype."""

    def __init__(self, plan: Plan, dtype: str, directory: Path) -> None:
        self._plan = plan
        self._dtype = dtype
        self._places = [directory / name for name in ("one", "two")]
        self._sides: dict[EngineName, Side] = {}
        models = [build(plan.checkpoint, dtype, seed=seed) for seed in (0, 1)]
        specs = {e: [write(m, at, engine=e) for m, at in zip(models, self._places, strict=True)] for e in plan.engines}
        for engine, (first, other) in specs.items():
            self._sides[engine] = Side(first, rows=max(plan.batches), tokens=plan.context + plan.tokens)
            self._sides[engine].add(other)
        self._specs = specs

    def decode(self) -> Iterator[Case]:
        plan = self._plan
        draws = torch.Generator().manual_seed(plan.context)
        prompt = torch.randint(1, 4096, (plan.context,), generator=draws).tolist()
        with self._stock(self._places[0]) as stock:
            for batch in plan.batches:
                rates = self._race(stock, prompt, batch)
                theirs = rates[""]
                for engine in plan.engines:
                    ours = rates[engine]
                    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
                    yield Case(self._dtype, engine, batch, statistics.median(ours), statistics.median(theirs), ratio)

    def _race(self, stock: _Stock, prompt: list[int], batch: int) -> dict[str, list[float]]:
        """Tokens/s of each engine in each run, and of stock vLLM under the empty name."""
        plan = self._plan
        rows = {engine: side.fill(prompt, batch) for engine, side in self._sides.items()}
        rates: dict[str, list[float]] = {name: [] for name in ("", *rows)}
        for _ in range(plan.runs + 1):
            answer = stock.ask(DecodeRequest(tuple(prompt), batch, plan.tokens))
            rates[""].append(answer.decoded / answer.seconds)
            for engine, side in self._sides.items():
                seconds, tokens = side.run(rows[engine], plan.context, plan.tokens)
                rates[engine].append(batch * (plan.tokens - 1) / seconds)
                if self._dtype == "float32":
                    assert [tuple(row) for row in tokens] == list(answer.tokens), f"{engine} disagrees with stock vLLM"
        return {name: measured[1:] for name, measured in rates.items()}  # the first warms up

    def replace(self) -> Iterator[Replacement]:
        vllm_s = self._restart()
        for engine, side in self._sides.items():
            specs = self._specs[engine]
            images = [np.fromfile(spec.image_path, dtype=np.uint8) for spec in specs]
            taken: list[float] = []
            for turn in range(_REPLACED + 1):
                start = time.perf_counter()
                side.replace(specs[turn % 2], images[turn % 2])
                side.fill(list(_SHORT), 1)
                taken.append(time.perf_counter() - start)
            aegis_s = statistics.median(taken[1:])
            nbytes = specs[0].manifest.image_bytes
            yield Replacement(self._dtype, engine, nbytes, aegis_s, vllm_s, vllm_s / aegis_s)

    def _restart(self) -> float:
        """Seconds from the end of one process's answer to the first token of the next; its caches are warm."""
        with self._stock(self._places[0]) as stock:
            stock.ask(DecodeRequest(_SHORT, 1, 2))
            start = time.perf_counter()
        with self._stock(self._places[1]) as stock:
            stock.ask(DecodeRequest(_SHORT, 1, 2))
            return time.perf_counter() - start

    @contextmanager
    def _stock(self, directory: Path) -> Iterator[_Stock]:
        stock = _Stock(directory, self._dtype, self._plan)
        try:
            yield stock
        finally:
            stock.stop()


class _Stock:
    """Stock vLLM's process, when it is ready."""

    def __init__(self, directory: Path, dtype: str, plan: Plan) -> None:
        options = (str(directory), dtype, str(plan.threads), str(max(plan.batches)))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.lab.decode.stock_vllm", *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": str(plan.threads)},
        )
        self._answer()

    def ask(self, request: DecodeRequest) -> Answer:
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(request) + b"\n")
        self._process.stdin.flush()
        return msgspec.json.decode(self._answer(), type=Answer)

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()

    def _answer(self) -> bytes:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise UserError("stock vLLM ended: its log is above", param="peer")
        return line
