"""The options of `aegis bench overload`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def overload(
    seconds: Annotated[float, typer.Option(metavar="S", min=2, help="Of requests in each run.")] = 40,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the workload.")] = 0,
    rps: Annotated[
        float | None,
        typer.Option(
            metavar="R",
            min=0.01,
            help="Requests of each model a second at 1 ×. [default: all it can do]",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="Of all runs; medians count.")] = 3,
    only: Annotated[list[str] | None, typer.Option(metavar="NAME", help="This policy; repeatable.")] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="A few seconds, to see that it works.")] = False,
    launch: Annotated[
        list[str] | None, typer.Option(metavar="OPTION", help="For each server, like --launch=--redis=off; repeatable.")
    ] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the result to this file.")] = None,
) -> int:
    """Measure a server that is offered up to eight times what it can do.

    The demo market is launched under each policy, and sent 0.5, 1, 2, 4 and 8 times that load. Meanwhile its health and
    metrics are asked for, and clients leave. docs/benchmarking.md explains the figures.

    \b
    Examples:
      aegis bench overload --json bench/results/overload_live.json
      aegis bench overload --tiny --rps 0.5
    """
    from bench.overload.suite import CONTENDERS, FACTORS, Setting, run

    run(
        Setting(
            seconds=3 if tiny else seconds,
            search_s=3 if tiny else seconds,
            lead_s=1 if tiny else 5,
            seed=seed,
            rps=rps,
            rounds=1 if tiny else rounds,
            contenders=only or list(CONTENDERS),
            factors=(1.0, 4.0) if tiny else FACTORS,
            launch=launch or (),
        ),
        json,
    )
    return 0
