"""The time of decisions: placing requests in markets of two sizes, and planning turns: `aegis lab schedule`.

Only the cores and policies that serve run. A decision is timed from the event to its effects, views included.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import Struct
from rich.console import Console
from rich.table import Table

from aegis.core.estimators import Hardware, Latency
from aegis.core.views import MAX_BATCH, BatchView
from aegis.policies import Site, recipe
from aegis.process import garbage_collection
from bench.common import result_files
from bench.common.figures import Figure, at_most
from bench.common.machine import Machine, describe
from bench.common.percentiles import percentile_of
from bench.lab.scheduling.placements import Replay, Size, make_spec
from bench.lab.scheduling.turns import TimedPolicy, Turns
from decode.policies.weighted_round_robin import WeightedRoundRobin

PLACING = ("arrival", "first token")
"""The events that a request is placed on, with `Submit` and with `Adopt`."""

LIMITS_US = {Size(16, 100): 20.0, Size(1000, 10_000): 200.0}
ROUND_LIMIT_US = 1000.0
PLAN_LIMIT_US = 50.0
_ARRIVALS = 20_000
_ROUNDS = 3000
_BATCHES = 64
_MEMORY_BYTES = 80 << 30


class Decision(Struct, frozen=True):
    """The time that the core took over one kind of event. `limit_us` None: measured for information."""

    setting: str
    event: str
    count: int
    p50_us: float
    p99_us: float
    max_us: float
    limit_us: float | None = None

    def figure(self) -> Figure:
        name = f"{self.event}, {self.setting}, p99"
        return (
            Figure(name, self.p99_us, "µs")
            if self.limit_us is None
            else at_most(name, self.p99_us, "µs", self.limit_us)
        )


class Result(Struct, frozen=True):
    machine: Machine
    figures: tuple[Figure, ...]
    decisions: tuple[Decision, ...]


def run(
    json_path: Path | None = None,
    limits_us: dict[Size, float] = LIMITS_US,
    arrivals: int = _ARRIVALS,
    rounds: int = _ROUNDS,
) -> Result:
    """Measures, prints a table and writes all to `json_path`. Raises UserError."""
    result_files.prepare(json_path)
    machine = describe()
    decisions = [each for size, limit_us in limits_us.items() for each in _placing(size, limit_us, arrivals)]
    decisions += [_planning(rounds), *_turns(rounds)]
    result = Result(machine, tuple(each.figure() for each in decisions), tuple(decisions))
    _show(result.decisions)
    if json_path is not None:
        result_files.write_json(json_path, result)
    return result


def _placing(size: Size, limit_us: float, arrivals: int) -> Iterator[Decision]:
    replay = Replay(size)
    garbage_collection.collect_seldom()
    replay.measure(arrivals)
    for event, durations_ns in sorted(replay.durations_ns.items(), key=lambda item: (item[0] not in PLACING, item[0])):
        yield _decision(str(size), event, durations_ns, limit_us if event in PLACING else None)


def _planning(rounds: int) -> Decision:
    """Views of full batches, each of a model of its own, and the plan of a round over them (Aegaeon eq. 2 and 3)."""
    policy, durations_ns = WeightedRoundRobin(), []
    specs = [make_spec(index) for index in range(_BATCHES)]
    latency = [Latency(spec.manifest, Hardware()) for spec in specs]
    for at in range(rounds):
        cached = [[100 + at + batch + row for row in range(MAX_BATCH)] for batch in range(_BATCHES)]
        start_ns = time.perf_counter_ns()
        views = [
            BatchView(i, spec.model, of.decode_ns(sum(tokens), MAX_BATCH), spec.slo.tbt_ns, of.switch_ns())
            for i, (spec, of, tokens) in enumerate(zip(specs, latency, cached, strict=True))
        ]
        policy.plan(views, at)
        durations_ns.append(time.perf_counter_ns() - start_ns)
    return _decision(f"{_BATCHES} batches", "decode round", durations_ns, ROUND_LIMIT_US)


def _turns(turns: int) -> Iterator[Decision]:
    """The choice of the next turn on an instance with as many models as batches, by our policy."""
    policy = TimedPolicy(recipe("least-slack").policy(Site(memory_bytes=_MEMORY_BYTES)), _BATCHES)
    instance = Turns(policy, _BATCHES)
    instance.measure(turns)
    setting = f"{_BATCHES} models"
    yield _decision(setting, "turn, the plan", policy.durations_ns, PLAN_LIMIT_US)
    yield _decision(setting, "turn, in the core", instance.durations_ns, None)


def _decision(setting: str, event: str, durations_ns: Sequence[int], limit_us: float | None) -> Decision:
    us = [ns / 1000 for ns in durations_ns]
    return Decision(setting, event, len(us), percentile_of(us, 50), percentile_of(us, 99), max(us), limit_us)


def _show(decisions: Sequence[Decision]) -> None:
    title = "Decisions, µs; markets are instances × models"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for head in ("setting", "event", "count", "p50", "p99", "max", "p99 has to be", ""):
        table.add_column(head, justify="right" if head in ("count", "p50", "p99", "max") else "left", overflow="fold")
    for each in decisions:
        figure = each.figure()
        mark = {None: "", True: "yes", False: "NO"}[figure.ok]
        numbers = (f"{value:.1f}" for value in (each.p50_us, each.p99_us, each.max_us))
        table.add_row(each.setting, each.event, str(each.count), *numbers, figure.wanted, mark)
    Console(markup=False, highlight=False).print(table, "")
