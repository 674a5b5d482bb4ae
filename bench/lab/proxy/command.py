"""The options of `aegis lab proxy`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def proxy(
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the figures to this file.")] = None,
    litellm: Annotated[
        Path | None,
        typer.Option(metavar="PYTHON", help="An interpreter that has litellm[proxy]. [default: aegis alone]"),
    ] = None,
    rounds: Annotated[int, typer.Option(metavar="N", min=1, max=1000, help="Figures are medians over them.")] = 5,
    routes: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Only latencies, of these: chat, messages, responses, embeddings, with commas. [default: all of chat]",
        ),
    ] = None,
) -> int:
    """Measure what the proxy costs where instances answer at once, beside LiteLLM's proxy in the same run.

    Each proxy has one core; the figures are what it adds to a request, requests and streamed tokens a second, and the
    memory of 2000 idle streams. The machine should have nothing else to do. Takes minutes.

    \b
    Examples:
      aegis lab proxy
      aegis lab proxy --litellm .venv-litellm/bin/python --json bench/results/proxy.json
      aegis lab proxy --litellm .venv-litellm/bin/python --routes messages,responses,embeddings
    """
    from bench.lab.proxy import route_suite
    from bench.lab.proxy.rounds import Plan
    from bench.lab.proxy.routes import routes_named
    from bench.lab.proxy.suite import run

    if routes is not None:
        route_suite.run(routes_named(routes), json, litellm=litellm, plan=Plan(rounds=rounds))
        return 0
    run(json, litellm=litellm, plan=Plan(rounds=rounds))
    return 0
