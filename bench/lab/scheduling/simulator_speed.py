"""The speed of the simulator, and how it changes with the size of the simulated market: `aegis lab simulator`."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from itertools import chain
from math import log
from pathlib import Path
from statistics import fmean, median

from msgspec import Struct
from rich.console import Console
from rich.table import Table

import decode.core
from aegis.core.model import Slo
from aegis.policies import recipe
from aegis.sim.catalogue import models
from aegis.sim.gpu_costs import gpu
from aegis.sim.market import SimRequest
from aegis.sim.simulation import Pool, simulate
from bench.common import result_files
from bench.common.figures import Figure, at_least, at_most
from bench.common.machine import Machine, describe
from bench.workloads import spec

LEAST_PER_S = 10_000
_REPETITIONS = 5
_SMALL_INSTANCES, _SMALL_REQUESTS = 16, 10_000
_RATE_PER_INSTANCE = 0.5  # requests per second: as many as there are in figure 11(a) at 80 models
_HOST_KV_BYTES_PER_INSTANCE = 64 << 30  # 1 TiB for 16 of them


class Size(Struct, frozen=True):
    """A market: so many requests in all, Poisson arrivals, as many for each instance and second as for any other
    size. Three of eight instances prefill."""

    models: int
    instances: int
    requests: int

    @property
    def small(self) -> Size:
        """Of the same kind: as many models for each instance. With more of them there are more turns."""
        models = -(-self.models * _SMALL_INSTANCES // self.instances)
        return Size(models, _SMALL_INSTANCES, min(self.requests, _SMALL_REQUESTS))

    def __str__(self) -> str:
        return f"{self.models} × {self.instances} × {self.requests}"


FIG_11A = Size(80, 16, 4800)
SCALES = (Size(80, 16, 100_000), Size(500, 100, 100_000), Size(300, 100, 100_000))
LARGE = Size(1000, 1000, 1_000_000)


class Case(Struct, frozen=True):
    """Medians over the repetitions, of what growth is told by means; the making of instances and models included, that
    of arrivals not."""

    size: Size
    requests: int  # that there were
    repetitions: int
    process_s: float
    wall_s: float

    @property
    def per_s(self) -> float:
        return self.requests / self.process_s

    @property
    def each_us(self) -> float:
        return 1e6 * self.process_s / self.requests


class Result(Struct, frozen=True):
    machine: Machine
    compiled: bool
    figures: tuple[Figure, ...]
    cases: tuple[Case, ...]


def run(
    json_path: Path | None = None,
    *,
    large: bool = False,
    first: Size = FIG_11A,
    scales: Sequence[Size] = SCALES,
    repetitions: int = _REPETITIONS,
) -> Result:
    """Measures, prints a table and writes all to `json_path`."""
    if json_path is not None:
        result_files.check(json_path)
    machine = describe()
    at_80 = _measured(first, repetitions)
    scales = (*scales, *([LARGE] if large else []))
    pairs = [_grown(scale) for scale in scales]
    figures = [at_least("simulated requests per second of process time", at_80.per_s, "1/s", LEAST_PER_S)]
    figures += [_growth(small, large) for small, large in pairs]
    result = Result(machine, compiled(), tuple(figures), (at_80, *dict.fromkeys(chain.from_iterable(pairs))))
    _show(result)
    if json_path is not None:
        result_files.write_json(json_path, result)
    return result


def compiled() -> bool:
    """Whether the cores in use are compiled ones."""
    return not str(decode.core.__file__).endswith(".py")


def _measured(size: Size, repetitions: int) -> Case:
    return _case(size, [_run(size) for _ in range(repetitions)], median)


def _grown(size: Size) -> tuple[Case, Case]:
    """The small market of its kind and the large one. A machine that has other guests may be half as fast from one
    second to the next, so both are measured for about as long: half of the small ones before the large one."""
    small, times = size.small, max(size.requests // size.small.requests // 2, 1)
    if small == size:
        case = _measured(size, 1)
        return case, case
    before, large = [_run(small) for _ in range(times)], _run(size)
    return _case(small, [*before, *(_run(small) for _ in range(times))], fmean), _case(size, [large], fmean)


def _run(size: Size) -> tuple[int, float, float]:
    """The number of requests, process time and wall time."""
    arrivals = _arrivals(size)
    gc.collect()  # objects of an earlier one
    process, wall = time.process_time(), time.perf_counter()
    simulate(_pool(size, arrivals), arrivals)
    return len(arrivals), time.process_time() - process, time.perf_counter() - wall


def _case(size: Size, runs: Sequence[tuple[int, float, float]], usual: Callable[[Sequence[float]], float]) -> Case:
    requests, process_s, wall_s = zip(*runs, strict=True)
    return Case(size, requests[0], len(runs), usual(process_s), usual(wall_s))


def _arrivals(size: Size) -> list[SimRequest]:
    rate = _RATE_PER_INSTANCE * size.instances
    text = f"poisson:models={size.models},rps={rate / size.models},duration={size.requests / rate},lengths=sharegpt"
    return [
        SimRequest(arrival.at_ns, arrival.model, arrival.input_tokens, arrival.output_tokens)
        for arrival in spec.parse(text, seed=0)
    ]


def _pool(size: Size, arrivals: Sequence[SimRequest]) -> Pool:
    prefills = size.instances * 3 // 8
    specs = models("mix", asked={wanted.model for wanted in arrivals}, slo=Slo())
    return Pool(
        gpu=gpu("h800"),
        specs=tuple(specs),
        prefills=prefills,
        decodes=size.instances - prefills,
        recipe=recipe("aegaeon"),
        host_kv_bytes=_HOST_KV_BYTES_PER_INSTANCE * size.instances,
    )


def _growth(small: Case, large: Case) -> Figure:
    """n·log n is time that grows for each request as log n does."""
    name = f"time per request at {large.size}, over that at {small.size}"
    return at_most(name, large.each_us / small.each_us, "", round(log(large.requests) / log(small.requests), 3))


def _show(result: Result) -> None:
    title = f"The simulator, {'compiled' if result.compiled else 'not compiled'}; models × instances × requests"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for head in ("size", "requests", "process, s", "wall, s", "requests/s", "µs each"):
        table.add_column(head, justify="left" if head == "size" else "right")
    for case in result.cases:
        times = f"{case.process_s:.2f}", f"{case.wall_s:.2f}", f"{case.per_s:.0f}", f"{case.each_us:.1f}"
        table.add_row(str(case.size), str(case.requests), *times)
    console = Console(markup=False, highlight=False)
    console.print(table, "")
    for figure in result.figures:
        verdict = "yes" if figure.ok else "NO"
        console.print(f"{figure.name}: {figure.value:.5g} {figure.unit}".rstrip() + f", {figure.wanted}: {verdict}")
