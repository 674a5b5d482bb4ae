"""Every figure of memory on the CPU device, each beside what it has to be: `aegis lab memory`.

The parts run one after the other; the machine should do nothing else meanwhile. Activating models is `aegis lab
switch`, and what a GPU does is `make test-gpu`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from msgspec import Struct
from rich.console import Console
from rich.table import Table

from aegis.core.errors import UserError
from bench.common import result_files
from bench.common.figures import Figure
from bench.common.machine import Machine, describe
from bench.lab.memory.parts import PARTS, Part


class PartResult(Struct, frozen=True):
    """All that one part measured, and how long that took."""

    name: str
    seconds: float
    measured: tuple[Struct, ...]


class Result(Struct, frozen=True):
    """`figures` are what was asked for, of all parts in their order."""

    machine: Machine
    figures: tuple[Figure, ...]
    parts: tuple[PartResult, ...]


def run(
    json_path: Path | None = None, only: Sequence[str] = (), known: Mapping[str, Part] = MappingProxyType(PARTS)
) -> Result:
    """Measures all parts, or `only` some, prints a table for each and writes all to `json_path`. Raises UserError."""
    if unknown := sorted(set(only) - set(known)):
        raise UserError(f"there is no part '{unknown[0]}'; there are {', '.join(known)}", param="only")
    result_files.prepare(json_path)
    machine, figures, parts = describe(), list[Figure](), list[PartResult]()
    for name, part in known.items():
        if only and name not in only:
            continue
        start_s = time.monotonic()
        measured = part.measure()
        parts.append(PartResult(name, time.monotonic() - start_s, measured))
        found = part.figures(*measured)
        _show(f"{part.title} ({parts[-1].seconds:.0f} s)", found)
        figures += found
    result = Result(machine, tuple(figures), tuple(parts))
    if json_path is not None:
        result_files.write_json(json_path, result)
    return result


def _show(title: str, figures: Sequence[Figure]) -> None:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for head in ("figure", "value", "unit", "has to be", ""):
        table.add_column(head, justify="right" if head == "value" else "left", overflow="fold")
    for each in figures:
        mark = {None: "", True: "yes", False: "NO"}[each.ok]
        table.add_row(each.name, f"{each.value:.4g}", each.unit, each.wanted, mark)
    Console(markup=False, highlight=False).print(table, "")
