"""Decoding beside llama.cpp: one checkpoint, one process, the same threads, greedy on both sides.

The checkpoint is random. llama.cpp gets it as a GGUF file in BF16, Q8_0 and Q4_0, written with the `gguf` package; ours
is an image in bfloat16, or with `--weights int8` and `int4`. Runs of the sides alternate; told are the median of each,
and of the ratios of runs that follow each other, for a shared machine's pace changes meanwhile. How many tokens both
sides have in common before they part says that they run the same model; rounding parts them sooner or later.
"""

from __future__ import annotations

import statistics
import tempfile
from itertools import takewhile
from pathlib import Path

import torch
from msgspec import Struct

from aegis.core.model import WeightsName
from bench.common import result_files
from bench.common.figures import Figure, at_least
from bench.common.machine import Machine, describe
from bench.lab.decode.engine_side import HALF_BILLION, Side, build, write
from bench.lab.decode.llama_cpp_side import FileType, LlamaCppSide, imported, write_gguf

KINDS: tuple[tuple[FileType, WeightsName], ...] = (("BF16", "dense"), ("Q8_0", "int8"), ("Q4_0", "int4"))
_RATIO_MIN = {HALF_BILLION: 1.0}
_SMALL_RATIO_MIN = 0.7


class Plan(Struct, frozen=True, kw_only=True):
    """Every checkpoint with every batch; each run decodes `tokens` tokens per sequence after `context` others."""

    checkpoints: tuple[str, ...] = ("50m", HALF_BILLION)
    batches: tuple[int, ...] = (1, 8)
    context: int = 64
    tokens: int = 33
    runs: int = 5
    threads: int = 1


class Case(Struct, frozen=True):
    """`common` of the tokens of a run are the same on both sides before the first that differs."""

    checkpoint: str
    file_type: str
    weights: WeightsName
    batch: int
    aegis_tokens_per_s: float
    llama_cpp_tokens_per_s: float
    ratio: float
    common: int


class Result(Struct, frozen=True):
    machine: Machine
    llama_cpp: str
    plan: Plan
    cases: tuple[Case, ...]
    figures: tuple[Figure, ...]


def run(json_path: Path | None = None, plan: Plan | None = None) -> Result:
    """Measures, prints the table and writes all to `json_path`. Raises UserError."""
    plan = plan or Plan()
    library, _ = imported()
    if json_path:
        result_files.check(json_path)
    torch.set_num_threads(plan.threads)
    print("checkpoint  theirs  ours   batch   aegis tokens/s   llama.cpp tokens/s   ratio  wanted  in common")
    cases = []
    for checkpoint in plan.checkpoints:
        model = build(checkpoint, "bfloat16")
        for file_type, weights in KINDS:
            with tempfile.TemporaryDirectory(prefix="aegis-llama-cpp-") as directory:
                path = Path(directory) / "model.gguf"
                write_gguf(model, path, file_type)
                tokens, rows = plan.context + plan.tokens, max(plan.batches)
                ours = Side(write(model, Path(directory), weights=weights), rows=rows, tokens=tokens)
                theirs = LlamaCppSide(path, rows=rows, tokens=tokens, threads=plan.threads)
                for batch in plan.batches:
                    case = _case((checkpoint, file_type, weights), ours, theirs, batch, plan)
                    cases.append(case)
                    print(_line(case, plan), flush=True)
                theirs.close()
    result = Result(describe(), library.__version__, plan, tuple(cases), tuple(map(_figure, cases)))
    if json_path:
        result_files.write_json(json_path, result)
    return result


def _case(names: tuple[str, FileType, WeightsName], ours: Side, theirs: LlamaCppSide, batch: int, plan: Plan) -> Case:
    prompt = list(range(1, plan.context + 1))
    our_rows, their_rows = ours.fill(prompt, batch), theirs.fill(prompt, batch)
    our_s, their_s = list[float](), list[float]()
    common = 0
    for attempt in range(plan.runs + 1):
        ours_took, our_tokens = ours.run(our_rows, plan.context, plan.tokens)
        theirs_took, their_tokens = theirs.run(their_rows, plan.context, plan.tokens)
        pairs = zip(our_tokens[0], their_tokens[0], strict=True)
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if attempt > 0:  # the first warms up
            our_s.append(ours_took)
            their_s.append(theirs_took)
    decoded = batch * (plan.tokens - 1)
    ratio = statistics.median(theirs / ours for theirs, ours in zip(their_s, our_s, strict=True))
    rates = decoded / statistics.median(our_s), decoded / statistics.median(their_s)
    return Case(*names, batch, *rates, ratio, common)


def _wanted(checkpoint: str) -> float:
    return _RATIO_MIN.get(checkpoint, _SMALL_RATIO_MIN)


def _figure(case: Case) -> Figure:
    name = f"{case.checkpoint}, {case.weights} beside {case.file_type}, batch {case.batch}: tokens/s over llama.cpp's"
    return at_least(name, case.ratio, "×", _wanted(case.checkpoint))


def _line(case: Case, plan: Plan) -> str:
    wanted = _wanted(case.checkpoint)
    return (
        f"{case.checkpoint:11} {case.file_type:7} {case.weights:6} {case.batch:5} {case.aegis_tokens_per_s:16.1f} "
        f"{case.llama_cpp_tokens_per_s:20.1f} {case.ratio:7.2f} {wanted:7.2f}  {case.common} of {plan.tokens}"
    )
