"""What becomes of a market on the GPUs of its plan when its traffic grows: `aegis plan`.

At each load the policy that answers is simulated, without and with `--refuse-late`, and every rival of the suite
`gpus`. The best rival is that with most tokens on time at that load, so it may be another one at each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from msgspec import Struct

from aegis.core.clock import NS_PER_S
from aegis.core.errors import UserError
from aegis.sim.simulation import Outcome
from aegis.telemetry.records import REFUSED, Record
from bench.plan.search import Plan, PlanSettings, deciding_of
from bench.simulate.cells.search import end_of
from bench.simulate.cells.suites import gpus, untuned
from bench.simulate.contenders import Contender
from bench.simulate.figures import Figures, figures
from bench.simulate.setting import Setting, pool_of, run
from bench.simulate.workers import each

LOADS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
_LOAD_MIN, _LOAD_MAX = 0.01, 100.0


class LoadPoint(Struct, frozen=True):
    """At `load` times the traffic. Tokens are of a second in which requests come: those `asked` for, and those on time.
    Requests that were `refused` are among those that failed."""

    load: float
    asked_per_s: float
    on_time_per_s: float
    refused: int
    figures: Figures


class LoadLine(Struct, frozen=True):
    contender: str
    points: list[LoadPoint]


class LoadCurve(Struct, frozen=True):
    """On so many GPUs, with the requests of this seed. `refusing`: ours, where requests that could not be served in
    time are refused. `best_rival` is for each load a place among `rivals`."""

    gpus: int
    seed: int
    ours: LoadLine
    refusing: LoadLine
    rivals: list[LoadLine]
    best_rival: list[int]

    def beside(self) -> list[tuple[LoadPoint, LoadLine, LoadPoint]]:
        """The point of each load, its best rival, and that one's point."""
        lines = [self.rivals[best] for best in self.best_rival]
        return [
            (point, line, line.points[at]) for at, (point, line) in enumerate(zip(self.ours.points, lines, strict=True))
        ]


def parse_loads(text: str | None) -> tuple[float, ...]:
    """`--loads`: in order, none for `none`. Raises UserError."""
    if text is None:
        return LOADS
    if text == "none":
        return ()
    loads = set()
    for part in text.split(","):
        try:
            load = float(part)
        except ValueError:
            load = 0.0
        if not _LOAD_MIN <= load <= _LOAD_MAX:
            raise UserError(f"--loads {text}: expected numbers from {_LOAD_MIN:g} to {_LOAD_MAX:g}, or none")
        loads.add(load)
    return tuple(sorted(loads))


def load_curve(settings: PlanSettings, answer: Plan, loads: Sequence[float]) -> LoadCurve:
    """The curve over the load of those requests that need most GPUs. Raises UserError."""
    need = answer.needs[0]
    most = deciding_of(need.found)
    count = round(end_of(need.gpus))
    placed = _placed(settings, need.contender, need.policy, most.seed, count)
    tasks = [replace(setting, load=load) for setting in placed.values() for load in loads]
    points = iter(each(_point, tasks, jobs=settings.jobs, title="more traffic"))
    ours, refusing, *rivals = (LoadLine(name, [next(points) for _ in loads]) for name in placed)
    return LoadCurve(count, most.seed, ours, refusing, rivals, best_rivals(rivals))


def best_rivals(rivals: Sequence[LoadLine]) -> list[int]:
    """Of each load the place of the best. Of several that are as good it is the one with earlier first tokens."""
    loads = range(len(rivals[0].points))
    return [max(range(len(rivals)), key=lambda at: _rank(rivals[at].points[load])) for load in loads]


def _placed(settings: PlanSettings, ours: str, policy: str, seed: int, count: int) -> dict[str, Setting]:
    """Ours, ours that refuses, then its rivals: those that can run on so many GPUs, each way to run them once."""
    setting = replace(settings.setting, policy=policy, seed=seed)
    suite = untuned(gpus(setting, "plan"))
    own = next(each for each in suite.contenders if each.name == ours)

    def of(contender: Contender) -> Setting:
        return suite.search(suite.cells[0], contender, seed, None).placed(count)

    mine = of(own)
    placed = {own.name: mine, f"{own.name}, refusing": replace(mine, refuse_late=True)}
    for rival in suite.rivals_of(policy):
        if (other := of(rival)) not in placed.values() and (count > 1 or pool_of(other).mixed):
            placed[rival.name] = other
    return placed


def _point(setting: Setting) -> LoadPoint:
    assert setting.load is not None
    return point_of(setting.load, run(setting, keep_times=True))


def point_of(load: float, outcome: Outcome) -> LoadPoint:
    records = outcome.records
    lasting_s = max((record.arrival_ns for record in records), default=0) / NS_PER_S or 1.0
    asked, on_time = sum(record.output_tokens for record in records), sum(record.on_time for record in records)
    return LoadPoint(load, asked / lasting_s, on_time / lasting_s, _refused(records), figures(outcome))


def _refused(records: Iterable[Record]) -> int:
    return sum(record.ended == REFUSED for record in records)


def _rank(point: LoadPoint) -> tuple[float, float]:
    return point.figures.attainment, -(point.figures.ttft_p99_ms or 0.0)
