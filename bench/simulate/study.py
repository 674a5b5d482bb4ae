"""Curves: policies over the values of a sweep, under the same conditions otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from msgspec import Struct

from aegis.core.errors import UserError
from bench.simulate.figures import Figures, figures
from bench.simulate.setting import Setting, run
from bench.simulate.sweep import Crossing, Sweep, crossing
from bench.simulate.workers import each
from bench.workloads import spec


class Point(Struct, frozen=True):
    """`at` is the sweep's value; None if nothing is swept."""

    at: float | None
    figures: Figures


class Curve(Struct, frozen=True):
    policy: str
    points: tuple[Point, ...]
    crossing: Crossing | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """`base` under each of the policies, at each value of the sweep. `trace_dir`: the workload of a value is the file
    that is called after it, and values without one are left out."""

    base: Setting
    policies: tuple[str, ...]
    sweep: Sweep | None = None
    trace_dir: Path | None = None

    def settings(self) -> list[tuple[float | None, Setting]]:
        """Raises UserError."""
        placed = [(None, self.base)] if self.sweep is None else self._swept(self.sweep)
        return [(at, replace(setting, policy=policy)) for policy in self.policies for at, setting in placed]

    def _swept(self, sweep: Sweep) -> list[tuple[float | None, Setting]]:
        assert self.base.workload
        settings: list[tuple[float | None, Setting]] = []
        for value in sweep.values:
            workload = spec.override(self.base.workload, sweep.key, value)
            if self.trace_dir is None:
                settings.append((float(value), replace(self.base, workload=workload)))
            elif (file := self.trace_dir / _file_name(workload)).exists():
                settings.append((float(value), replace(self.base, workload=None, trace=str(file))))
        if not settings:
            raise UserError(f"{self.trace_dir}: holds no file like {_file_name(workload)}")
        return settings


def _file_name(workload: str) -> str:
    """The file of the trace that stands for a generated workload: `M16_rps0.10.csv.gz`."""
    keys = dict(part.split("=") for part in workload.partition(":")[2].split(","))
    return f"M{keys['models']}_rps{float(keys['rps']):.2f}.csv.gz"


def curves(studies: Sequence[Study], *, jobs: int, title: str) -> list[list[Curve]]:
    """The curves of each study, one per policy. Raises UserError."""
    placed = [(study, study.settings()) for study in studies]
    tasks = [setting for _, settings in placed for _, setting in settings]
    results = iter(each(_figures, tasks, jobs=jobs, title=title))
    answer = []
    for study, settings in placed:
        points = [(setting.policy, Point(at, next(results))) for at, setting in settings]
        answer.append([_curve(name, [point for of, point in points if of == name]) for name in study.policies])
    return answer


def _figures(setting: Setting) -> Figures:
    return figures(run(setting, keep_times=True))


def _curve(policy: str, points: Sequence[Point]) -> Curve:
    values = [point.at for point in points if point.at is not None]
    fall = crossing(values, [point.figures.attainment for point in points]) if values else None
    return Curve(policy, tuple(points), fall)
