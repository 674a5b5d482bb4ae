"""Section: KV slabs that hold no block (Aegaeon §7.3, Figure 16)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aegis.telemetry.memory_report import MemoryReport, SlabsReport
from bench.common.numbers import percent
from bench.report.folder import Folder
from bench.report.markup import Markup, table
from bench.report.page_charts import shares
from bench.report.panels import fragmentation_cards
from bench.report.run import Run
from bench.report.section import card, lacking, section

_NAMED = 2


@dataclass(frozen=True, slots=True)
class Empty:
    """Over the reports in which slabs were held: mean and highest share of their bytes without a block."""

    mean: float
    highest: float
    reports: int


def fragmentation(folder: Folder) -> Markup:
    told = [run for run in folder.runs if run.memory]
    found = [(run, empty) for run in told if (empty := empty_shares(run.memory))]
    return section(
        "fragmentation",
        "Fragmentation",
        "The share of the KV slabs' bytes that is in no block: free blocks, and the end of a slab where no block fits. "
        "The mean over the memory reports of a run.",
        *(_card(run, empty) for run, empty in found),
        *fragmentation_cards(folder),
        lacking("slabs in the memory reports", _idle(told, found), "nothing was in flight when they were made"),
        lacking(
            "fragmentation",
            folder.without(lambda run: run.memory),
            "there are no memory reports; `aegis memory --json > NAME.memory.json` writes one while a server has work",
        ),
    )


def _idle(told: Sequence[Run], found: Sequence[tuple[Run, dict[str, Empty]]]) -> list[str]:
    busy = {run.name for run, _ in found}
    return [run.name for run in told if run.name not in busy]


def empty_shares(reports: Sequence[MemoryReport]) -> dict[str, Empty]:
    """The empty shares by region and shape, and of a region's shapes together; no entry where nothing was held."""
    found: dict[str, list[float]] = {}
    for report in reports:
        regions = [("host", report.host_kv.slabs)]
        regions += [(f"device {device.device}", device.slabs) for device in report.devices]
        for region, slabs in regions:
            for name, share in _shares(region, slabs):
                found.setdefault(name, []).append(share)
    return {name: Empty(sum(each) / len(each), max(each), len(each)) for name, each in found.items()}


def _shares(region: str, slabs: SlabsReport) -> list[tuple[str, float]]:
    if not slabs.shapes:
        return []
    each = [
        (f"{region}, {shape.block_bytes / 1024:g} KiB: {_names(shape.models)}", shape.fragmentation)
        for shape in slabs.shapes
    ]
    return [(f"{region}, all shapes", slabs.fragmentation), *each]


def _names(models: Sequence[str]) -> str:
    more = f" and {len(models) - _NAMED} more" if len(models) > _NAMED else ""
    return ", ".join(models[:_NAMED]) + more


def _card(run: Run, empty: dict[str, Empty]) -> Markup:
    bars = {name: {"no block": each.mean} for name, each in empty.items()}
    rows = [(name, percent(each.mean), percent(each.highest), str(each.reports)) for name, each in empty.items()]
    told = "; ".join(f"{row[0]} {row[1]}" for row in rows)
    return card(
        run.name,
        shares(f"Fragmentation of {run.name}. {told}.", bars, ("no block",)),
        table(("slabs of", "mean", "highest", "reports"), rows, caption=f"Fragmentation of {run.name}"),
    )
