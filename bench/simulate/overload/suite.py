"""What the suite `overload` is made of: recorded and drawn traffic, up to several times what the GPUs can serve."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from aegis.core.errors import UserError
from bench.simulate.contenders import OURS, UNDIVIDED, Contender, ours, rivals
from bench.simulate.setting import Setting
from bench.simulate.tuning import fitted
from bench.workloads import spec

NAME = "overload"
REFUSING = f"{OURS}, refusing"
_SECONDS, _TUNING_SECONDS = 600, 200
_TINY_SECONDS, _TINY_MODELS = 4, 4
_FACTORS = (1, 1.5, 2, 4)
_POISSON = {0.1: 171, 0.5: 106}
"""The models of which least-slack has 90 % of tokens on time on 16 GPUs: the medians of `0.1rps/slo1/sharegpt` and
`0.5rps/slo1/sharegpt` in bench/results/cells.json of commit 9724ce8, rounded."""


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A trace that is `speed` times as fast, `seconds` of it, on each of so many `gpus`."""

    name: str
    file: str
    gpus: tuple[int, ...]
    seconds: int = _SECONDS
    speed: int | None = None
    models: str = "mix"
    named_shapes: tuple[tuple[str, str], ...] = ()


_RECORDED = (
    _Recorded(
        "servegen",
        "servegen_market.csv.gz",
        (6, 9, 12, 18, 24, 30, 38),
        models="qwen2.5-14b",
        named_shapes=(("small", "qwen2.5-7b"), ("image", "qwen2.5-7b")),
    ),
    _Recorded("arena", "arena27.csv.gz", (1, 2, 3)),
    _Recorded("gentd", "gentd26_86models.csv.gz", tuple(range(1, 9)), seconds=4032, speed=300),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Requests of `seconds` on some GPUs. Rivals are tuned on the first `tuning_seconds`: all of them if it is a trace,
    no part of which is like the whole. `available`: its trace is there."""

    name: str
    setting: Setting
    seconds: int
    tuning_seconds: int
    available: bool = True

    def contender(self, contender: Contender, seed: int) -> tuple[Contender, Setting]:
        """The contender with the knobs that there are on the cell's GPUs, and its simulation before it is tuned."""
        placed = replace(contender, knobs=fitted(contender.knobs, self.setting.mixed))
        return placed, placed.of(replace(self.setting, seed=seed))

    def shortened(self, setting: Setting) -> Setting:
        """What rivals are tuned on."""
        if self.tuning_seconds == self.seconds:
            return setting
        assert setting.workload
        return replace(setting, workload=spec.override(setting.workload, "duration", str(self.tuning_seconds)))

    def conditions(self) -> dict[str, Any]:
        """What results depend on, but for contender and seed; a trace by its name, wherever it lies."""
        conditions = self.setting.conditions()
        for name in ("seed", "roles", "counted", "lanes", "max_batch", "budget_tokens"):
            del conditions[name]
        if self.setting.trace:
            conditions["trace"] = Path(self.setting.trace).name
        return conditions


@dataclass(frozen=True, slots=True, kw_only=True)
class OverloadSuite:
    """`missing`: the names of traces that are not there."""

    contenders: tuple[Contender, ...]
    cells: tuple[Cell, ...]
    missing: tuple[str, ...]
    title: str = "Tokens on time where not all can be"
    tiny: bool = False

    def pairs(self) -> Iterator[tuple[Cell, Contender]]:
        """The cells with their contenders, in order. One GPU is not enough where prefill is apart."""
        for cell in self.cells:
            for contender in self.contenders:
                if cell.available and (cell.setting.mixed > 1 or not contender.apart):
                    yield cell, contender


def overload(trace_dir: Path | None = None, *, tiny: bool = False) -> OverloadSuite:
    """Without the directory nothing recorded is available. Raises UserError if it holds none of the traces."""
    recorded = [(each, trace_dir / each.file if trace_dir else Path(each.file)) for each in _RECORDED]
    there = {each.name for each, file in recorded if trace_dir and file.is_file()}
    if trace_dir and not there:
        files = ", ".join(each.file for each in _RECORDED)
        raise UserError(f"--trace-dir {trace_dir}: has none of {files}")
    cells = [_of_trace(each, file, gpus, each.name in there) for each, file in recorded for gpus in each.gpus]
    cells += [_poisson(rps, models, factor) for rps, models in _POISSON.items() for factor in _FACTORS]
    return OverloadSuite(
        contenders=(ours(), ours(UNDIVIDED, lanes=False), ours(REFUSING, refuse_late=True), *rivals()),
        cells=tuple(map(_tiny, cells) if tiny else cells),
        missing=tuple(each.file for each in _RECORDED if each.name not in there),
        tiny=tiny,
    )


def _of_trace(trace: _Recorded, file: Path, gpus: int, available: bool) -> Cell:
    setting = Setting(
        policy="",
        trace=str(file),
        trace_s=trace.seconds,
        trace_speed=trace.speed,
        models=trace.models,
        named_shapes=trace.named_shapes,
        mixed=gpus,
        prefill=1,
        decode=max(gpus - 1, 1),
    )
    return Cell(
        name=f"{trace.name}/{gpus}gpus",
        setting=setting,
        seconds=trace.seconds,
        tuning_seconds=trace.seconds,
        available=available,
    )


def _poisson(rps: float, models: int, factor: float) -> Cell:
    return Cell(
        name=f"poisson-{rps:g}rps/x{factor:g}",
        setting=Setting(policy="", workload=f"poisson:models={models},rps={rps * factor:g},duration={_SECONDS}"),
        seconds=_SECONDS,
        tuning_seconds=_TUNING_SECONDS,
    )


def _tiny(cell: Cell) -> Cell:
    setting = cell.setting
    if setting.workload:
        few = spec.override(setting.workload, "models", str(_TINY_MODELS))
        setting = replace(setting, workload=spec.override(few, "duration", str(_TINY_SECONDS)))
        return replace(cell, setting=setting, seconds=_TINY_SECONDS, tuning_seconds=_TINY_SECONDS // 2)
    setting = replace(setting, trace_s=_TINY_SECONDS)
    return replace(cell, setting=setting, seconds=_TINY_SECONDS, tuning_seconds=_TINY_SECONDS)
