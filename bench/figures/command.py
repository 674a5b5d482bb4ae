"""The options of `aegis bench figures`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from bench.simulate.common_options import Jobs


def figures(
    into: Annotated[
        Path, typer.Option(metavar="DIR", help="Where their results are, and go: NAME.json and NAME.png.")
    ] = Path("bench/results"),
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A suite, like fig11a or prism-fig5. May be repeated.")
    ] = None,
    trace_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Traces that some suites also replay. Without them: drawn ones.")
    ] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="Runs of seconds, to check that it works.")] = False,
    jobs: Jobs = None,
) -> int:
    """Simulate all figures of the papers anew, and say what has changed: docs/figures.md.

    It takes hours; with --only, minutes.

    \b
    Examples:
      aegis bench figures
      aegis bench figures --only prism-fig5 --only fig18 --trace-dir traces
    """
    from aegis.core.errors import UserError
    from bench.common import result_files
    from bench.figures.suite import Renewal, names, renew, said
    from bench.simulate.prism import suite as prism
    from bench.simulate.workers import cores

    known = names()
    if unknown := [name for name in only or () if name not in known]:
        raise UserError(f"--only {unknown[0]}: should be one of {', '.join(known)}")
    if tiny and into == Path("bench/results"):
        raise UserError("--tiny: is no result; name a directory with --into")
    prism.suites(trace_dir)  # before hours are spent without the traces
    result_files.make_directory(into)
    renewal = Renewal(into=into, trace_dir=trace_dir, tiny=tiny, jobs=jobs or cores())
    changes = []
    for name in known:
        if not only or name in only:
            print(f"simulating {name}", file=sys.stderr, flush=True)
            changes.append(renew(name, renewal))
    print("", *[said(change) for change in changes], sep="\n")
    return 0
