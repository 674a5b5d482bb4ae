"""The options of `aegis simulate`."""

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

_INSTANCES_MAX = 10_000


def simulate(
    workload: Workload = None,
    trace: Trace = None,
    suite: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A figure of a paper, or a comparison: fig11a, ..., cells, gpus, overload. May be repeated.",
        ),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="May be repeated. [default: least-slack; of a suite: those of its figure]"),
    ] = None,
    as_published: Annotated[
        bool, typer.Option("--as-published", help="Policies with their papers' own settings, handicaps included.")
    ] = False,
    prefill: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, max=_INSTANCES_MAX, help="Prefill instances, a GPU each. [default: 6]"),
    ] = None,
    decode: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, max=_INSTANCES_MAX, help="Decode instances, a GPU each. [default: 10]"),
    ] = None,
    mixed: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, max=_INSTANCES_MAX, help="Instances where all prefill and decode. [default: P + D]"
        ),
    ] = None,
    roles: Annotated[
        str | None,
        typer.Option(
            metavar="ROLES",
            help="auto: all instances prefill and decode; fixed: as --prefill and --decode say. If not given, as the "
            "policy is made for; least-slack: fixed where --prefill or --decode is given, else auto.",
        ),
    ] = None,
    gpu: Gpu = None,
    models: Models = None,
    weights: Weights = None,
    lazy: Lazy = False,
    fetch: Fetch = None,
    cache_size: CacheSize = None,
    slo: SloText = None,
    give_up: Annotated[
        float | None,
        typer.Option(
            metavar="S",
            min=0.001,
            max=1e9,
            help="A request without a token after so many seconds fails. [default: none does]",
        ),
    ] = None,
    costs: Costs = None,
    link: Link = None,
    switch: Annotated[
        float | None,
        typer.Option(metavar="S", min=0, max=1e6, help="Seconds of a switch besides its copies. [default: the GPU's]"),
    ] = None,
    lanes: Annotated[
        bool | None,
        typer.Option(
            "--lanes/--no-lanes",
            help="Whether policies may divide GPUs between two runs. [default: those that are made for it]",
        ),
    ] = None,
    noise: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE",
            help="Runs take more or less than their costs, with this standard deviation: 0.05, or measured, which is "
            "that of --costs. [default: none]",
        ),
    ] = None,
    peer_loads: Annotated[
        bool,
        typer.Option("--peer-loads", help="Demanded weights also come over idle links of the node's other GPUs."),
    ] = False,
    placement: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Models move between instances by load: pressure, kvpr (Prism's), or none. "
            "[default: pressure for least-slack, kvpr for prism, else none]",
        ),
    ] = None,
    refuse_late: Annotated[
        bool, typer.Option("--refuse-late", help="Requests that could not be served in time are refused.")
    ] = False,
    sweep: Annotated[
        str | None, typer.Option(metavar="SWEEP", help="A key of the workload, like models=16:80:8.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of everything that is drawn.")] = 0,
    jobs: Jobs = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            max=1_000_000,
            help="Of cells, gpus and --faults: so many from --seed. [default: 3; of --faults: 200]",
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT", help="Of suites that search: only what is called CELL/POLICY with it in. May be repeated."
        ),
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Of cells, gpus and overload: repeat also results in the file of --json.")
    ] = False,
    screen: Annotated[
        bool,
        typer.Option(
            "--screen", help="Of cells and gpus: search rivals no further that miss the goal where the best one ends."
        ),
    ] = False,
    trace_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Of a suite: its traces, like M16_rps0.10.csv.gz.")
    ] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="Of a suite: a short run, to check that it works.")] = False,
    faults: Annotated[
        bool,
        typer.Option(
            "--faults", help="Play small markets in which everything goes wrong; each seed has to keep every law."
        ),
    ] = False,
    fault: Annotated[
        list[str] | None,
        typer.Option(metavar="KIND", help="Only this kind of fault, like crash or pause. May be repeated."),
    ] = None,
    last: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Of --faults: the last N events of a seed that breaks a law."),
    ] = None,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write all figures. [default: none; of a suite: NAME.json]")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Draw them, .png or .svg; not of mux-… [default: none; of a suite: NAME.png]"
        ),
    ] = None,
    records: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The outcome of each request, one JSON a line.")
    ] = None,
    spans: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The work of each instance, one JSON a line.")
    ] = None,
    decisions: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Decisions and their reasons, for `aegis explain FILE`.")
    ] = None,
) -> int:
    """Run the schedulers that serve on simulated GPUs.

    The same command gives the same bytes on any machine. docs/simulate.md explains it.

    \b
    Examples:
      aegis simulate --workload poisson:models=80,rps=0.1,duration=600
      aegis simulate --workload poisson:rps=0.5 --sweep models=16:64:8 --policy aegaeon --policy serverlessllm
      aegis simulate --trace trace.csv --gpu h100 --prefill 2 --decode 6 --slo ttft=5,tbt=0.05 --plot out.png
      aegis simulate --suite fig11a
      aegis simulate --suite gpus --trace trace.csv --json gpus.json
      aegis simulate --faults --seeds 1000
    """
    given: dict[str, Any] = dict(locals())
    if faults or fault:
        from bench.simulate.options import run_faults

        return run_faults(given)
    from bench.simulate.options import run

    run(given)
    return 0
