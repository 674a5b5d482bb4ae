"""Running suites: figures beside what was published, as a table, JSON and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from aegis.core.errors import UserError
from bench.common import result_files
from bench.simulate import breakdown, fragmentation, plot_files, switching, table, utilisation
from bench.simulate.references import CLAIMS, Comparison, compare
from bench.simulate.setting import Setting
from bench.simulate.study import Study, curves
from bench.simulate.suites import Form, Panel, Suite, conditions, swept
from bench.simulate.workers import each

_MEASURES = {
    Form.BREAKDOWN: breakdown.measure,
    Form.SWITCHING: switching.measure,
    Form.FRAGMENTATION: fragmentation.measure,
    Form.UTILISATION: utilisation.measure,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The way in which suites are run. `policies` of none: those that `aegis simulate` chooses."""

    policies: tuple[str, ...]
    as_published: bool = False
    tiny: bool = False
    seed: int = 0
    jobs: int = 1
    trace_dir: Path | None = None


def run(suite: Suite, choice: Choice, *, json: Path, plot: Path) -> None:
    """Raises UserError."""
    result_files.check(json)
    plot_files.check(plot)
    if choice.as_published and not suite.publishable:
        raise UserError(f"--as-published is not of --suite {suite.name}, whose panels say what a switch takes")
    result = _curves(suite, choice, plot) if suite.form is Form.CURVES else _measured(suite, choice, plot)
    head = {"suite": suite.name, "title": suite.title, "as_published": choice.as_published, "seed": choice.seed}
    content = head | {"claim": CLAIMS.get(suite.name), "panels": result}
    result_files.write_json(json, content)
    table.plain_console().print(f"\n{json} and {plot} are written")


def _conditions(panel: Panel, choice: Choice) -> Setting:
    return conditions(panel, as_published=choice.as_published, tiny=choice.tiny, seed=choice.seed)


# --- attainment over what is swept ----------------------------------------------------------------------------------


def _curves(suite: Suite, choice: Choice, plot: Path) -> list[dict[str, Any]]:
    studies = [
        Study(
            base=_conditions(panel, choice),
            policies=suite.policies or choice.policies,
            sweep=swept(panel, tiny=choice.tiny),
            trace_dir=choice.trace_dir,
        )
        for panel in suite.panels
    ]
    results = curves(studies, jobs=choice.jobs, title=suite.name)
    figure, axes = plot_files.sheet(len(studies), suite.title)
    written = []
    for panel, study, result, place in zip(suite.panels, studies, results, axes, strict=True):
        assert study.sweep
        comparisons = compare(suite.name + panel.name, result, as_published=choice.as_published)
        plot_files.attainment(place, result, study.sweep.key, panel.title)
        table.show(result, study.sweep.key, title=f"{suite.title}: {panel.title}")
        _show_comparisons(comparisons)
        written.append(_written(panel, study.base, {"key": study.sweep.key, "curves": result, "beside": comparisons}))
    plot_files.save(figure, plot)
    return written


def _written(panel: Panel, setting: Setting, result: dict[str, Any]) -> dict[str, Any]:
    return {"panel": panel.name, "title": panel.title, "setting": setting.conditions()} | result


def _show_comparisons(comparisons: Sequence[Comparison]) -> None:
    if not comparisons:
        return
    shown = Table(box=None, pad_edge=False)
    for title in ("policy", "here", "there", "difference", "there is"):
        shown.add_column(title, overflow="fold")
    for comparison in comparisons:
        difference = "-" if comparison.difference_percent is None else f"{comparison.difference_percent:+.1f} %"
        shown.add_row(comparison.policy, comparison.ours, comparison.theirs, difference, comparison.source)
    table.plain_console().print("\nBeside what was published:", shown)


# --- other figures --------------------------------------------------------------------------------------------------


def _measured(suite: Suite, choice: Choice, plot: Path) -> list[dict[str, Any]]:
    """The results of one policy: that of the panel, or else the first."""
    settings = [
        replace(_conditions(panel, choice), policy=panel.policy or choice.policies[0]) for panel in suite.panels
    ]
    results: list[Any] = each(_MEASURES[suite.form], settings, jobs=choice.jobs, title=suite.name)
    _draw(suite, results, plot)
    _show(suite, results)
    return [
        _written(panel, setting, {"policy": setting.policy, "result": result})
        for panel, setting, result in zip(suite.panels, settings, results, strict=True)
    ]


def _draw(suite: Suite, results: Sequence[Any], plot: Path) -> None:
    named = list(zip((panel.title for panel in suite.panels), results, strict=True))
    figure, axes = plot_files.sheet(len(named) if suite.form is Form.SWITCHING else 1, suite.title)
    match suite.form:
        case Form.BREAKDOWN:
            plot_files.breakdowns(axes[0], named)
        case Form.FRAGMENTATION:
            plot_files.fragmentation(axes[0], named)
        case Form.UTILISATION:
            plot_files.utilisation(axes[0], named)
        case Form.SWITCHING:
            for place, (title, result) in zip(axes, named, strict=True):
                plot_files.switching(place, result, title)
    plot_files.save(figure, plot)


def _show(suite: Suite, results: Sequence[Any]) -> None:
    """A row for each panel."""
    rows = [{"": panel.title} | _row(suite.form, result) for panel, result in zip(suite.panels, results, strict=True)]
    shown = Table(box=None, pad_edge=False)
    for title in dict.fromkeys(title for row in rows for title in row):
        shown.add_column(title, justify="right" if title else "left")
    for row in rows:
        shown.add_row(*(row.get(str(column.header), "-") for column in shown.columns))
    table.plain_console().print(suite.title, shown, "", CLAIMS.get(suite.name, ""), sep="\n")


def _row(form: Form, result: Any) -> dict[str, str]:
    match form:
        case Form.BREAKDOWN:
            return {stage.replace("_", " "): f"{100 * getattr(result, stage):.1f} %" for stage in breakdown.STAGES}
        case Form.UTILISATION:
            return {
                "idlest": f"{100 * result.lowest:.1f} %",
                "busiest": f"{100 * result.highest:.1f} %",
                "all": f"{100 * result.mean:.1f} %",
                "on time": f"{100 * result.attainment:.1f} %",
            }
        case Form.FRAGMENTATION:
            return {shape: f"{100 * waste.of_peak:.1f} %" for shape, waste in result.shapes.items()}
        case _:
            spread = {f"to {root}, p50 / p99, s": taken for root, taken in result.switches.items()}
            spread["KV copy, p50 / p99, s"] = result.kv_copies
            return {"prefetched": f"{100 * result.prefetched:.1f} %"} | {
                title: f"{taken.cdf_ms[49] / 1e3:.3f} / {taken.cdf_ms[98] / 1e3:.3f}"
                for title, taken in spread.items()
                if taken.count
            }
