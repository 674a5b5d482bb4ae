"""The options of `aegis bench fidelity`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

WORKLOAD = "gamma:models=8,rps=0.25,cv=2,duration=300,lengths=uniform,input=16-1200,output=16-240"
CALIBRATE_ON = "gamma:models=8,rps=0.3,cv=2,duration=330,lengths=uniform,input=16-1500,output=16-240"


def fidelity(
    workload: Annotated[str, typer.Option(metavar="SPEC", help="The requests that are compared.")] = WORKLOAD,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the workload.")] = 1,
    costs: Annotated[
        Path | None, typer.Option(metavar="FILE", help="As `aegis calibrate` wrote them. [default: measured]")
    ] = None,
    calibrate_on: Annotated[
        str, typer.Option(metavar="SPEC", help="The requests that costs are measured on, where no file has them.")
    ] = CALIBRATE_ON,
    calibrate_seed: Annotated[int, typer.Option(metavar="N", help="Seed of those requests.")] = 2,
    piece: Annotated[
        float,
        typer.Option(metavar="S", min=1, max=3600, help="Seconds of either workload before the other's turn."),
    ] = 30,
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="A running server. [default: the demo market is launched]")
    ] = None,
    launch: Annotated[
        list[str] | None,
        typer.Option(metavar="OPTION", help="For the server that is launched, like --launch=--decode=2; repeatable."),
    ] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the figures to this file.")] = None,
    keep: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep spans, records and costs in this directory.")
    ] = None,
) -> int:
    """Measure how well a simulation predicts a server.

    The requests are sent to a server, and simulated on the same instances and memory by costs that were measured on
    other requests, which come in between. What the server's own estimators predicted is scored as well. The machine
    should have nothing else to do. Takes twelve minutes.

    \b
    Examples:
      aegis bench fidelity --json bench/results/fidelity.json
      aegis bench fidelity --costs costs.yaml --url http://127.0.0.1:8000
      aegis bench fidelity --launch=--decode=2 --launch=--device-memory=64MiB
    """
    from bench.fidelity.suite import FidelityOptions, run

    run(
        FidelityOptions(
            workload=workload,
            seed=seed,
            calibrate_on=calibrate_on,
            calibrate_seed=calibrate_seed,
            piece_s=piece,
            costs=costs,
            url=url,
            launch=launch or (),
            json=json,
            keep=keep,
        )
    )
    return 0
