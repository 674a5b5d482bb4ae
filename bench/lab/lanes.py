"""A decode beside a long prompt on two lanes of one engine: `aegis lab lanes`.

One process has two cores. On lanes, a thread with one core decodes as long as another one, with the other core,
prefills a prompt. Beside that stand each alone on its core, and both in turns on the two cores, with two threads. All
of it is measured in each of several rounds, and medians are taken of what the rounds say, so that a machine whose speed
drifts does not spoil the ratios.

The processor that each thread had is measured, too. Where it is less than the time, somebody else computed, or the
threads waited for each other: Python runs in one of them at a time. What each keeps by processor time says what the
memory and the caches that both share cost, on a machine that has other work as well. For turns there is no such figure:
of two threads, one that waits for the other keeps its processor busy.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from msgspec import Struct
from rich.console import Console

from aegis.core.errors import UserError
from aegis.device.cpu.lanes import DividedCores
from aegis.device.protocol import Lane
from aegis.engine.lane_threads import compute_in
from bench.common import result_files
from bench.common.figures import Figure, at_least
from bench.common.machine import Machine, describe
from bench.lab.decode.engine_side import Filled, Side, build, write

DECODE_KEEPS_MIN = 0.8
PREFILL_KEEPS_MIN = 0.6
WORK_MIN = 1.3
_SWITCH_INTERVAL_S = 0.0005  # an instance's
_ALONE_STEPS = 24
_POSITIONS = 64  # behind the context, which steps use over and over


class Plan(Struct, frozen=True, kw_only=True):
    """What decodes: each of these `batches`, after `context` tokens; and the prompt beside it."""

    checkpoint: str = "50m"
    dtype: str = "bfloat16"
    batches: tuple[int, ...] = (1, 8)
    context: int = 1000
    prompt_tokens: int = 4000
    rounds: int = 5


class Took(Struct, frozen=True):
    """`steps` decode steps, or one prefill: seconds, and those of them for which its thread had a processor."""

    steps: int
    s: float
    processor_s: float


def step_s(took: Took) -> float:
    return took.s / took.steps


def step_processor_s(took: Took) -> float:
    """What a step would take if its thread always had a processor."""
    return took.processor_s / took.steps


Measure = Callable[[Took], float]


class Round(Struct, frozen=True):
    """Alone on one core, alone on both cores, and beside each other on one core each. 99 % of the steps beside the
    prompt took `p99_s` or less."""

    decode_one: Took
    prefill_one: Took
    decode_two: Took
    prefill_two: Took
    decode_beside: Took
    prefill_beside: Took
    p99_s: float

    def decode_keeps(self, of: Measure) -> float:
        """The share of its speed alone on one core that decode keeps beside a prefill."""
        return of(self.decode_one) / of(self.decode_beside)

    def prefill_keeps(self, of: Measure) -> float:
        return of(self.prefill_one) / of(self.prefill_beside)

    @property
    def work(self) -> float:
        """What is done beside each other, over what turns on both cores do in the same time: the time that these take
        for a prompt over that of the prompt beside the decode, and the same of a step."""
        return self.prefill_two.s / self.prefill_beside.s + step_s(self.decode_two) / step_s(self.decode_beside)


class Case(Struct, frozen=True):
    batch: int
    rounds: tuple[Round, ...]


class Result(Struct, frozen=True):
    machine: Machine
    plan: Plan
    figures: tuple[Figure, ...]
    cases: tuple[Case, ...]


def run(json_path: Path | None = None, plan: Plan | None = None) -> Result:
    """Measures, prints the figures and writes all to `json_path`. Raises UserError where there are not two cores."""
    plan = plan or Plan()
    if json_path:
        result_files.check(json_path)
    before, cores = sys.getswitchinterval(), os.sched_getaffinity(0)
    if len(cores) < 2:
        raise UserError("lanes need two cores, and this process may use one")
    os.sched_setaffinity(0, sorted(cores)[:2])
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        cases = tuple([_measure(plan, batch) for batch in plan.batches])
    finally:
        sys.setswitchinterval(before)
        os.sched_setaffinity(0, cores)
    figures = tuple([figure for case in cases for figure in _figures(case)])
    console = Console(markup=False, highlight=False)
    for figure in figures:
        console.print(f"{figure.name:56} {figure.value:8.3g} {figure.unit:3} {figure.wanted}".rstrip())
    result = Result(describe(), plan, figures, cases)
    if json_path:
        result_files.write_json(json_path, result)
    return result


def _figures(case: Case) -> list[Figure]:
    def middle(of: Callable[[Round], float]) -> float:
        return statistics.median([of(each) for each in case.rounds])

    name = f"batch {case.batch}"
    return [
        Figure(f"{name}: step alone on one core", 1e3 * middle(lambda r: step_s(r.decode_one)), "ms"),
        Figure(f"{name}: step beside the prompt", 1e3 * middle(lambda r: step_s(r.decode_beside)), "ms"),
        Figure(f"{name}: step beside the prompt, p99", 1e3 * middle(lambda r: r.p99_s), "ms"),
        at_least(
            f"{name}: the decode keeps of its speed", middle(lambda r: r.decode_keeps(step_s)), "", DECODE_KEEPS_MIN
        ),
        at_least(
            f"{name}: the prefill keeps of its speed", middle(lambda r: r.prefill_keeps(step_s)), "", PREFILL_KEEPS_MIN
        ),
        at_least(f"{name}: work, over turns on both cores", middle(lambda r: r.work), "", WORK_MIN),
        Figure(f"{name}: processor, of the decode's time alone", middle(lambda r: _had(r.decode_one)), ""),
        Figure(f"{name}: processor, of the decode's time beside", middle(lambda r: _had(r.decode_beside)), ""),
        Figure(f"{name}: processor, of the prefill's time beside", middle(lambda r: _had(r.prefill_beside)), ""),
        Figure(f"{name}: the decode keeps, by processor", middle(lambda r: r.decode_keeps(step_processor_s)), ""),
        Figure(f"{name}: the prefill keeps, by processor", middle(lambda r: r.prefill_keeps(step_processor_s)), ""),
    ]


def _had(took: Took) -> float:
    return took.processor_s / took.s


def _measure(plan: Plan, batch: int) -> Case:
    with tempfile.TemporaryDirectory() as directory:
        spec = write(build(plan.checkpoint, plan.dtype), Path(directory))
        longest = max(plan.prompt_tokens, plan.context + _POSITIONS) + 1
        side = Side(spec, rows=batch + 1, tokens=longest)
    draws = torch.Generator().manual_seed(batch)
    context, prompt = (
        torch.randint(1, 4096, (tokens,), generator=draws).tolist() for tokens in (plan.context, plan.prompt_tokens)
    )
    work = _Work(side, side.fill(context, batch), plan.context, prompt)
    rounds = tuple([work.round() for _ in range(plan.rounds + 1)][1:])  # the first one warms up
    work.close()
    return Case(batch, rounds)


class _Work:
    """One side's decode and prompt, and the threads that run them."""

    def __init__(self, side: Side, rows: Filled, context: int, prompt: list[int]) -> None:
        self._side = side
        self._rows = rows
        self._context = context
        self._prompt = prompt
        self._lanes = [_thread_in(lane) for lane in DividedCores(2).lanes((500, 500))]
        self._both = ThreadPoolExecutor(1)
        self._both.submit(torch.set_num_threads, 2).result()

    def round(self) -> Round:
        first, second = self._lanes
        decode_one, _ = first.submit(self._decode, lambda steps: steps == _ALONE_STEPS).result()
        prefill_one = second.submit(self._prefill).result()
        decode_two, _ = self._both.submit(self._decode, lambda steps: steps == _ALONE_STEPS).result()
        prefill_two = self._both.submit(self._prefill).result()
        beside = second.submit(self._prefill)
        decode_beside, steps_s = first.submit(self._decode, lambda _: beside.done()).result()
        return Round(
            decode_one,
            prefill_one,
            decode_two,
            prefill_two,
            decode_beside,
            beside.result(),
            sorted(steps_s)[int(0.99 * (len(steps_s) - 1))],
        )

    def close(self) -> None:
        for pool in (*self._lanes, self._both):
            pool.shutdown()

    def _prefill(self) -> Took:
        began_s, processor_s = time.perf_counter(), time.thread_time()
        self._side.prefill(self._prompt, len(self._rows))
        return Took(1, time.perf_counter() - began_s, time.thread_time() - processor_s)

    def _decode(self, enough: Callable[[int], bool]) -> tuple[Took, list[float]]:
        """Steps until so many are enough; all together, and the seconds of each."""
        steps_s = list[float]()
        began_s, processor_s = time.perf_counter(), time.thread_time()
        while not steps_s or not enough(len(steps_s)):
            step_s, _ = self._side.run(self._rows, self._context + len(steps_s) % _POSITIONS, 2)
            steps_s.append(step_s)
        took = Took(len(steps_s), time.perf_counter() - began_s, time.thread_time() - processor_s)
        return took, steps_s


def _thread_in(lane: Lane) -> ThreadPoolExecutor:
    pool = ThreadPoolExecutor(1)
    pool.submit(compute_in, lane).result()
    return pool
