"""Sections: SLO attainment, over what was swept and over time; and what others have published beside it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from bench.common.numbers import NONE, number, percent
from bench.report.folder import Folder
from bench.report.markup import Markup, element, table
from bench.report.page_charts import Axis, Series, lines
from bench.report.run import Run, Sweep
from bench.report.section import RECORDS, card, lacking, section
from bench.simulate.sweep import GOAL

_BINS = 40
_SHARE = Axis("", 0.0, 1.0, percent=True, goal=GOAL)
_TITLES = {"models": "number of models", "rps": "requests per second and model"}


def attainment(folder: Folder) -> Markup:
    swept = [sweep for sweep in folder.sweeps if sweep.key is not None]
    timed = [run for run in folder.runs if any(record.output_tokens for record in run.records)]
    cards = [_sweep(sweep) for sweep in swept] + ([_over_time(timed)] if timed else [])
    return section(
        "attainment",
        "SLO attainment",
        "The share of the tokens asked for that came in time; tokens that never came are among those that did not. The "
        f"dashed line is {GOAL:.0%}.",
        *cards,
        lacking(
            "curves over models or rates",
            [] if swept else [folder.name],
            "`aegis simulate --sweep models=16:80:8 --json FILE` makes some",
        ),
        lacking("attainment over time", folder.without(lambda run: run.records), RECORDS),
    )


def over_time(run: Run) -> list[tuple[float, float]]:
    """Of the requests that arrived in each of some even stretches; seconds since the start, which is that of the first
    request where the run's is of another clock."""
    start_ns = run.start_ns if run.one_clock else min(record.arrival_ns for record in run.records)
    arrivals_s = np.array([(record.arrival_ns - start_ns) / 1e9 for record in run.records])
    width_s = max(float(arrivals_s.max()), 1e-9) / _BINS
    bins = np.minimum((arrivals_s / width_s).astype(int), _BINS - 1)
    met = np.bincount(bins, [record.on_time for record in run.records], _BINS)
    asked = np.bincount(bins, [record.output_tokens for record in run.records], _BINS)
    return [((at + 0.5) * width_s, float(met[at] / asked[at])) for at in range(_BINS) if asked[at]]


def _sweep(sweep: Sweep) -> Markup:
    key = sweep.key or ""
    series = [
        Series(
            curve.policy,
            [(point.at, point.figures.attainment) for point in curve.points if point.at is not None],
            marked=True,
        )
        for curve in sweep.curves
    ]
    values = sorted({at for each in series for at, _ in each.points})
    rows = [
        (each.name, *(percent(dict(each.points).get(value)) for value in values), str(curve.crossing or ""))
        for each, curve in zip(series, sweep.curves, strict=True)
    ]
    figures = table(("policy", *map(number, values), f"at {GOAL:.0%}"), rows, caption=f"Attainment by {key}")
    falls = ", ".join(f"{curve.policy} {curve.crossing}" for curve in sweep.curves if curve.crossing)
    alt = f"{sweep.name}: attainment over {_TITLES.get(key, key)}. Falls below {GOAL:.0%} at: {falls}."
    return card(sweep.name, lines(alt, series, Axis(_TITLES.get(key, key)), _SHARE), figures)


def _over_time(runs: Iterable[Run]) -> Markup:
    series = [Series(run.name, over_time(run)) for run in runs]
    rows = [
        (each.name, percent(min(values)), percent(sum(values) / len(values)), percent(max(values)))
        for each in series
        for values in [[value for _, value in each.points]]
    ]
    worst = "; ".join(f"{name}: lowest {low}, mean {mean}" for name, low, mean, _ in rows)
    return card(
        "By time of arrival",
        lines(f"Attainment by time of arrival. {worst}.", series, Axis("seconds", 0.0), _SHARE),
        table(("run", "lowest", "mean", "highest"), rows, caption=f"Attainment in {_BINS} even stretches of time"),
    )


def published(folder: Folder) -> Markup:
    rows = [
        (sweep.name, each.policy, each.ours, each.theirs, _difference(each.difference_percent), each.source)
        for sweep in folder.sweeps
        for each in sweep.beside
    ]
    head = ("figure", "policy", "here", "there", "difference", "there is")
    claims = [element("p", element("strong", name), f": {claim}.") for name, claim in folder.claims.items()]
    return section(
        "published",
        "Beside what was published",
        f"Where curves fall below {GOAL:.0%} here and elsewhere, and what papers say of a figure in words.",
        *([table(head, rows, caption=f"Falls below {GOAL:.0%} at")] if rows else []),
        *claims,
        lacking(
            "published figures",
            [] if rows or claims else [folder.name],
            "`aegis simulate --suite fig11a` writes some beside its own",
        ),
    )


def _difference(percent: float | None) -> str:
    return NONE if percent is None else f"{percent:+.1f} %"
