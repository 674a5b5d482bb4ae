"""The options of `aegis calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from aegis.server_url import Url


def calibrate(
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Write the costs to this YAML file.")],
    url: Url,
    probe: Annotated[
        bool, typer.Option("--probe", help="Send the server groups of requests that show the costs of steps.")
    ] = False,
    seconds: Annotated[
        float | None,
        typer.Option(
            metavar="S", min=0.0, max=1e6, help="Watch for so long. [default: take what the server remembers]"
        ),
    ] = None,
    spans: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Take what /debug/spans answered, instead of a server.")
    ] = None,
    records: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Take also what /debug/records answered, for the costs of messages."),
    ] = None,
) -> int:
    """Learn the costs of steps, copies and messages from the history of a running server.

    Costs are fitted model by model and judged on runs that the fit has not seen. The server should be under load of all
    kinds meanwhile, or else --probe makes it: docs/calibrate.md.

    \b
    Examples:
      aegis calibrate --probe --out costs.yaml
      aegis calibrate --out costs.yaml
      aegis calibrate --url http://127.0.0.1:9000 --seconds 120 --out costs.yaml
      aegis simulate --trace trace.csv --gpu node.yaml --costs costs.yaml
    """
    from bench.calibration.suite import run

    run(url=url, probe=probe, seconds=seconds, spans=spans, records=records, out=out)
    return 0
