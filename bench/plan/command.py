"""The options of `aegis plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from bench.simulate.common_options import (
    CacheSize,
    Costs,
    Fetch,
    Gpu,
    Jobs,
    Lazy,
    Link,
    Models,
    SloText,
    Trace,
    Weights,
    Workload,
)


def plan(
    workload: Workload = None,
    trace: Trace = None,
    models: Models = None,
    weights: Weights = None,
    lazy: Lazy = False,
    fetch: Fetch = None,
    cache_size: CacheSize = None,
    gpu: Gpu = None,
    slo: SloText = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="The policy that answers; further ones are compared. [default: least-slack]"),
    ] = None,
    most: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Largest number of GPUs. [default: 64, or two for each model]"),
    ] = None,
    costs: Costs = None,
    link: Link = None,
    seeds: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, max=1000, help="Draws of a --workload; the worst decides. [default: 3]"),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the first draw.")] = 0,
    loads: Annotated[
        str | None,
        typer.Option(
            metavar="LIST", help="What becomes of it at so many times the traffic, or none. [default: 0.5,1,1.5,2,3,4]"
        ),
    ] = None,
    jobs: Jobs = None,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the plan and all numbers of GPUs that were tried.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw tokens on time over the traffic, as .png or .svg.")
    ] = None,
) -> int:
    """How many GPUs serve these models and this traffic, by simulation: docs/planning.md.

    The fewest with 99 % of first tokens and 90 % of all tokens on time, what one less would cost, and how many it takes
    with an instance for each model. Then how many tokens that many GPUs bring on time when the traffic grows, and how
    many with the best rival.

    \b
    Examples:
      aegis plan --workload market:models=40,duration=600 --gpu h100
      aegis plan --trace trace.csv.gz --models market.yaml --gpu h100 --slo ttft=5,tbt=0.05 --json plan.json
      aegis plan --workload poisson:models=4,rps=0.5 --models qwen2.5-72b --gpu h100x4 --most 16
    """
    given: dict[str, Any] = dict(locals())
    from bench.plan.suite import run

    run(given)
    return 0
