"""The options of `aegis bench compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def compare(
    files: Annotated[list[Path], typer.Argument(metavar="A.json B.json", help="Results of `aegis bench serve`.")],
    per_model: Annotated[bool, typer.Option("--per-model", help="Each model too.")] = False,
) -> int:
    """Compare runs of the same workload: the figures of each as ratios to the first one's.

    \b
    Example:
      aegis bench compare before.json after.json --per-model
    """
    from bench.compare.runs import run

    run(files, per_model=per_model)
    return 0
