"""Options that `aegis simulate` and `aegis plan` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Workload = Annotated[str | None, typer.Option(metavar="SPEC", help="Requests from a generator (docs/workloads.md).")]
Trace = Annotated[Path | None, typer.Option(metavar="FILE", help="Requests from a trace.")]
Gpu = Annotated[
    str | None, typer.Option(metavar="GPU", help="h100, h800, h20, a100, a10, h800x4, or a .yaml file. [default: h800]")
]
Models = Annotated[
    str | None, typer.Option(metavar="SPEC", help="mix:80, qwen2.5-32b:4, or a .yaml file. [default: mix]")
]
SloText = Annotated[
    str | None, typer.Option(metavar="SLO", help="When tokens are due, in seconds. [default: ttft=10,tbt=0.1]")
]
Costs = Annotated[Path | None, typer.Option(metavar="FILE", help="Step costs that `aegis calibrate` has measured.")]
Link = Annotated[
    float | None, typer.Option(metavar="GB", min=0.001, max=1e6, help="GB/s of each GPU's link. [default: its own]")
]
Weights = Annotated[
    str | None,
    typer.Option(
        metavar="FORM", help="Of models that do not say: dense, int8, int4, int4-g64, int4-g32. [default: dense]"
    ),
]
Lazy = Annotated[
    bool, typer.Option("--lazy", help="Models that do not say otherwise are fetched with their first request.")
]
Fetch = Annotated[
    float | None,
    typer.Option(
        metavar="GB", min=0.001, max=1e6, help="GB/s at which lazy models come, all together. [default: 1.25]"
    ),
]
CacheSize = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Of fetched models on the node; the longest unused leave. [default: no bound]"),
]
Jobs = Annotated[int | None, typer.Option(metavar="N", min=1, help="Simulations at a time. [default: one per core]")]
