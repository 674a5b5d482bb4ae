"""The options of `aegis bench rivals`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def rivals(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where results, spans and records are written.")],
    seconds: Annotated[int, typer.Option(metavar="N", help="Seconds of requests in each of twelve runs.", min=1)] = 90,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the workloads.")] = 0,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the figures there.")] = None,
    launch: Annotated[
        list[str] | None,
        typer.Option(metavar="OPTION", help="For each server, like --launch=--device-memory=64MiB; repeatable."),
    ] = None,
) -> int:
    """Compare token-level switching with request-level switching and dedicated instances, on this machine.

    The demo market is launched under each policy on the same memory, and sent the same requests: long outputs at a high
    rate, a market, and strict deadlines.

    \b
    Example:
      aegis bench rivals runs/ && aegis bench report runs/
    """
    from bench.rivals.suite import run

    run(directory, seconds=seconds, seed=seed, launch=launch or (), json=json)
    return 0
