"""The runs in a folder: files are told apart by their contents and put together by their names.

`a.json`, `a.records.jsonl`, `a.spans.jsonl.gz`, `a.decisions.jsonl.gz` and `a.memory.jsonl` are of the run `a`,
`b/spans.jsonl` is of the run `b`. Several files of the same kind are read one after the other.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from aegis.core.decision import Decision
from aegis.core.errors import UserError
from aegis.telemetry.files import parse, read_bytes
from aegis.telemetry.memory_report import MemoryReport
from aegis.telemetry.records import Record
from aegis.telemetry.spans import Span
from bench.report.run import Panel, Run, Served, Sweep
from bench.simulate.breakdown import Breakdown
from bench.simulate.fragmentation import Fragmentation
from bench.simulate.references import Comparison
from bench.simulate.study import Curve
from bench.simulate.sweep import Sweep as Swept
from bench.simulate.switching import Switching

_SUFFIXES = re.compile(r"(?P<name>.*?)\.(?P<form>jsonl?)(\.gz)?")
_PANELS = {"mean_s": Breakdown, "kv_copies": Switching, "shapes": Fragmentation}
_KIND = re.compile(r"(^|[._/-])(spans|records|decisions|memory|results?)([._-]?\d+)?$")


@dataclass(frozen=True, slots=True)
class Folder:
    """`claims` are what papers say of suites in words, by name; `unknown` JSON files that are of no use here."""

    name: str
    runs: tuple[Run, ...]
    sweeps: tuple[Sweep, ...]
    panels: tuple[Panel, ...]
    claims: dict[str, str]
    unknown: tuple[str, ...]

    def without(self, has: Callable[[Run], object]) -> list[str]:
        """The runs that lack something, or the folder's own name where it has no runs at all."""
        return [run.name for run in self.runs if not has(run)] if self.runs else [self.name]


@dataclass(slots=True)
class _RunFiles:
    spans: list[Span] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    memory: list[MemoryReport] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    result: Served | None = None

    def run(self, name: str) -> Run:
        return Run(name, self.spans, self.records, self.result, self.memory, self.decisions)


def read(folder: Path) -> Folder:
    """Raises UserError, with the name of a file that is broken, and where there is nothing to report."""
    if not folder.is_dir():
        raise UserError(f"{folder}: is no folder; give the one that the results are in")
    reader = _Reader(folder)
    for file in sorted(folder.rglob("*.json*")):
        reader.take(file)
    runs = tuple(found.run(name) for name, found in sorted(reader.found.items()))
    if not runs and not reader.sweeps and not reader.panels:
        raise UserError(
            f"{folder}: holds no results; `aegis bench serve` and `aegis simulate` write some with --json, --records "
            "and --spans"
        )
    return Folder(
        name=folder.resolve().name,
        runs=runs,
        sweeps=tuple(reader.sweeps),
        panels=tuple(reader.panels),
        claims=reader.claims,
        unknown=tuple(reader.unknown),
    )


class _Reader:
    """Sorts files into runs, sweeps and what is of no use."""

    def __init__(self, folder: Path) -> None:
        self.found: dict[str, _RunFiles] = {}
        self.sweeps: list[Sweep] = []
        self.panels: list[Panel] = []
        self.claims: dict[str, str] = {}
        self.unknown: list[str] = []
        self._folder = folder

    def take(self, file: Path) -> None:
        """Raises UserError."""
        match = _SUFFIXES.fullmatch(file.relative_to(self._folder).as_posix())
        if match is None or not file.is_file():
            return
        name = _KIND.sub("", match["name"]) or self._folder.resolve().name
        content, source = read_bytes(file), str(file)
        known = (self._lines if match["form"] == "jsonl" else self._object)(name, content, source)
        if not known:
            self.unknown.append(file.relative_to(self._folder).as_posix())

    def _of(self, name: str) -> _RunFiles:
        return self.found.setdefault(name, _RunFiles())

    def _lines(self, name: str, content: bytes, source: str) -> bool:
        first = _decoded(content.lstrip().split(b"\n", 1)[0] or b"null", source + ":1")
        if isinstance(first, list):
            self._of(name).spans += parse(content, Span, source)
        elif isinstance(first, dict) and "arrival_ns" in first:
            self._of(name).records += parse(content, Record, source)
        elif isinstance(first, dict) and "why" in first:
            self._of(name).decisions += parse(content, Decision, source)
        elif isinstance(first, dict) and "model_cache" in first:
            self._of(name).memory += parse(content, MemoryReport, source)
        else:
            return False
        return True

    def _object(self, name: str, content: bytes, source: str) -> bool:
        held = _decoded(content, source)
        if not isinstance(held, dict):
            return False
        if "slo_attainment" in held or "request_throughput" in held:
            self._of(name).result = _converted(held, Served, source)
        elif "model_cache" in held:
            self._of(name).memory.append(_converted(held, MemoryReport, source))
        elif "curves" in held:
            curves = _converted(held["curves"], tuple[Curve, ...], source)
            swept = _converted(held.get("sweep"), Swept | None, source)
            self.sweeps.append(Sweep(name, swept.key if swept else None, curves))
        elif "panels" in held:
            if claim := _converted(held.get("claim"), str | None, source):
                self.claims[name] = claim
            for panel in _converted(held["panels"], list[dict[str, Any]], source):
                self._panel(f"{name}: {panel.get('title', '')}", panel, source)
        else:
            return False
        return True

    def _panel(self, name: str, panel: dict[str, Any], source: str) -> None:
        if "curves" in panel:
            curves = _converted(panel["curves"], tuple[Curve, ...], source)
            beside = _converted(panel.get("beside", ()), tuple[Comparison, ...], source)
            self.sweeps.append(Sweep(name, _converted(panel.get("key"), str | None, source), curves, beside))
        elif isinstance(result := panel.get("result"), dict):
            kind = next((kind for key, kind in _PANELS.items() if key in result), None)
            if kind is not None:
                self.panels.append(Panel(name, _converted(result, kind, source)))


def _decoded(content: bytes, source: str) -> Any:
    try:
        return msgspec.json.decode(content)
    except (msgspec.DecodeError, RecursionError) as error:
        raise UserError(f"{source}: is no JSON: {error}") from None


def _converted(content: Any, kind: Any, source: str) -> Any:
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        raise UserError(f"{source}: {error}") from None
