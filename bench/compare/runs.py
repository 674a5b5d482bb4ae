"""`aegis bench compare`: runs of one workload side by side, metric by metric."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from math import isclose
from pathlib import Path
from typing import Any, Literal

import msgspec
from rich.console import Console
from rich.table import Table

from aegis.config.paths import refuse_device
from aegis.core.errors import UserError

_MORE_IS_BETTER = (
    "completed",
    "request_throughput",
    "request_goodput",
    "output_throughput",
    "total_token_throughput",
    "max_output_tokens_per_s",
    "slo_attainment",
)
_LESS_IS_BETTER = ("failed", "duration")
_SAME_WORKLOAD = ("workload", "num_prompts", "request_rate", "burstiness", "slo")
_REQUIRED = ("completed", "duration", "num_prompts")


def run(files: Sequence[Path], *, per_model: bool = False) -> None:
    """Prints each file's figures as ratios to the first one's. Raises UserError if they cannot be compared."""
    if len(files) < 2:
        raise UserError("give two or more results; the others are compared with the first")
    results = [_read(file) for file in files]
    for file, other in zip(files[1:], results[1:], strict=True):
        _check_comparable(files[0], results[0], file, other)
    width = None if sys.stdout.isatty() else 10_000  # a line for each metric where a program reads
    console = Console(markup=False, highlight=False, width=width)
    console.print(_table("", files, results), crop=False)
    if per_model:
        shares = [result.get("per_model") or {} for result in results]
        for model in sorted(set(shares[0]).intersection(*shares[1:])):
            console.print(_table(model, files, [share[model] for share in shares]), crop=False)


def verdict(metric: str, before: float, after: float) -> str:
    """`better`, `worse` or `same`, by what is good of this metric."""
    if isclose(before, after, rel_tol=1e-9):
        return "same"
    return "better" if (after > before) == (metric in _MORE_IS_BETTER) else "worse"


def ratio(before: float, after: float) -> float | None:
    """None if the first is nothing and the other is not."""
    if before:
        return after / before
    return None if after else 1.0


def metrics(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The metrics that are good when high or when low and that all results have, in the first one's order."""
    for name in results[0]:
        has_direction = name in _MORE_IS_BETTER or name in _LESS_IS_BETTER or name.endswith("_ms")
        told = all(isinstance(result.get(name), int | float) for result in results)
        if has_direction and not name.startswith("std_") and "lateness" not in name and told:
            yield name


def _table(title: str, files: Sequence[Path], results: Sequence[Mapping[str, Any]]) -> Table:
    """Names of files fold where there is no room for them, and nothing else does."""
    rows = [_row(name, results) for name in metrics(results)]
    headings = ["metric", files[0].stem, *(heading for file in files[1:] for heading in (file.stem, "ratio", ""))]
    table = Table(title=title or None, box=None, pad_edge=False, title_justify="left")
    for heading, *cells in zip(headings, *rows, strict=True):
        justify: Literal["left", "right"] = "left" if heading in ("metric", "") else "right"
        table.add_column(heading, justify=justify, overflow="fold", min_width=max(map(len, cells), default=None))
    for row in rows:
        table.add_row(*row)
    return table


def _row(name: str, results: Sequence[Mapping[str, Any]]) -> list[str]:
    before = results[0][name]
    cells = [name, f"{before:.4g}"]
    for result in results[1:]:
        quotient = ratio(before, result[name])
        cells += [f"{result[name]:.4g}", "-" if quotient is None else f"{quotient:.3f}"]
        cells.append(verdict(name, before, result[name]))
    return cells


def _read(file: Path) -> dict[str, Any]:
    try:
        refuse_device(file)
        result = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from None
    except msgspec.DecodeError:
        raise UserError(f"{file}: is no JSON object") from None
    if missing := [name for name in _REQUIRED if name not in result]:
        raise UserError(f"{file}: is no result of `aegis bench serve`: it has no {missing[0]!r}")
    try:
        msgspec.convert(result.get("per_model"), dict[str, dict[str, Any]] | None)
    except msgspec.ValidationError:
        raise UserError(
            f"{file}: is no result of `aegis bench serve`: 'per_model' should be figures by model"
        ) from None
    return result


def _check_comparable(first: Path, before: Mapping[str, Any], other: Path, after: Mapping[str, Any]) -> None:
    """Checks that both have the same workload; a result of vLLM's own says less about it."""
    for name in _SAME_WORKLOAD:
        if name in before and name in after and before[name] != after[name]:
            raise UserError(
                f"{first} and {other} cannot be compared: {name} is {_shown(before[name])} in the one and "
                f"{_shown(after[name])} in the other"
            )


def _shown(value: Any) -> str:
    return msgspec.json.encode(value).decode()
