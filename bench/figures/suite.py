"""All suites that are figures of papers, in the order of the papers, and what has changed in their results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
from msgspec import Struct

from aegis.core.errors import UserError
from bench.common import result_files
from bench.common.processes import ended_in_order
from bench.simulate import goodput, goodput_run
from bench.simulate.options import policies
from bench.simulate.prism import run as prism_run
from bench.simulate.prism.suite import suites
from bench.simulate.suite_run import Choice, run
from bench.simulate.suites import SUITES

_HEAD = "measured"
_AEGAEON = ("fig7", *[name for name in SUITES if name != "fig7"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewal:
    """Where results go, and how they are made. With a `trace_dir` its traces have panels, too."""

    into: Path
    trace_dir: Path | None = None
    tiny: bool = False
    jobs: int = 1


class Change(Struct, frozen=True):
    """What became of a results file: so many of its figures differ, the one at `where` by the largest share. `share` is
    None where what there is has changed, and not only how much."""

    name: str
    figures: int
    differ: int | None  # None: there was no file
    share: float | None = None
    where: str = ""


def names() -> tuple[str, ...]:
    """The names of all suites, in order: Aegaeon's, Prism's, MuxWise's."""
    return (*_AEGAEON, *suites(None), *goodput.SUITES)


def renew(name: str, renewal: Renewal) -> Change:
    """What there was stays until all of it is there anew, however this ends. Raises UserError."""
    kept = renewal.into / f"{name.replace('-', '_')}.json"
    before = _read(kept) if kept.exists() else None
    with ended_in_order(), TemporaryDirectory(dir=renewal.into, prefix="renewing-") as directory:
        json = Path(directory) / kept.name
        _simulate(name, renewal, json)
        after = _read(json)
        if (plot := json.with_suffix(".png")).exists():
            plot.replace(kept.with_suffix(".png"))
        result_files.write_json(kept, after)
    return changed(name, before, after)


def _simulate(name: str, renewal: Renewal, json: Path) -> None:
    plot = json.with_suffix(".png")
    if name in SUITES:
        chosen = Choice(policies=policies(as_published=False), tiny=renewal.tiny, jobs=renewal.jobs)
        run(SUITES[name], chosen, json=json, plot=plot)
    elif name in goodput.SUITES:
        goodput_run.run(goodput.SUITES[name], json=json, tiny=renewal.tiny, seed=0, jobs=renewal.jobs)
    else:
        choice = prism_run.Choice(tiny=renewal.tiny, jobs=renewal.jobs)
        prism_run.run(suites(renewal.trace_dir)[name], choice, json=json, plot=plot)


def changed(name: str, before: Any, after: Any) -> Change:
    """But for their heads."""
    new = dict(_figures(after))
    if before is None:
        return Change(name, len(new), None)
    old = dict(_figures(before))
    differing = [where for where in {**old, **new} if old.get(where) != new.get(where)]
    shares = {where: _share(old.get(where), new.get(where)) for where in differing}
    if not shares:
        return Change(name, len(new), 0)
    worst = max(shares, key=lambda where: (shares[where] is None, shares[where] or 0.0))
    return Change(name, len(new), len(differing), shares[worst], worst)


def said(change: Change) -> str:
    """The change in a line."""
    if change.differ is None:
        return f"{change.name}: {change.figures} figures, for the first time"
    if not change.differ:
        return f"{change.name}: all {change.figures} figures as before"
    how = "is another one" if change.share is None else f"by {100 * change.share:.2g} %"
    return f"{change.name}: {change.differ} of {change.figures} figures differ, most of all {change.where} {how}"


def _read(file: Path) -> Any:
    try:
        return msgspec.json.decode(file.read_bytes())
    except (OSError, msgspec.DecodeError):
        raise UserError(f"{file}: holds no results") from None


def _figures(content: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf with its path."""
    if isinstance(content, Mapping):
        for key, value in content.items():
            if where or key != _HEAD:
                yield from _figures(value, f"{where}/{key}" if where else str(key))
    elif isinstance(content, list):
        for at, value in enumerate(content):
            yield from _figures(value, f"{where}/{at}")
    else:
        yield where, content


def _share(before: Any, after: Any) -> float | None:
    numbers = [isinstance(value, int | float) and not isinstance(value, bool) for value in (before, after)]
    return abs(after - before) / max(abs(before), abs(after)) if all(numbers) else None
