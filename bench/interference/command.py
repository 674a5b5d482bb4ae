"""The options of `aegis bench interference`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from aegis.server_url import url_option


def interference(
    model: Annotated[str, typer.Option(metavar="NAME", help="The model that streams.")],
    other: Annotated[
        str | None, typer.Option(metavar="NAME", help="Long prompts go to this model too. [default: none]")
    ] = None,
    *,
    base_url: Annotated[str, url_option("--base-url", "--url", of="Address of any server with OpenAI's API.")],
    prompts: Annotated[
        str, typer.Option(metavar="N,N…", help="Lengths of the long prompts, in tokens.")
    ] = "512,4000,12000",
    tokens: Annotated[int, typer.Option(metavar="N", min=8, help="Of the stream.")] = 600,
    repeat: Annotated[int, typer.Option(metavar="N", min=1, help="Runs of each; the median is shown.")] = 3,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the prompts.")] = 0,
    label: Annotated[str, typer.Option(metavar="TEXT", help="A name for the server, in the result.")] = "",
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the result to this file.")] = None,
) -> int:
    """Measure how long a stream stands still, and a short prompt waits, when a long prompt arrives.

    A stream runs. A long prompt comes beside it, and 0.1 s later a short one, to the same model as the long one. Needs
    a server that takes prompts as token ids. docs/benchmarking.md explains the figures.

    \b
    Example:
      aegis bench interference --model lighthouse-llama --other bakery-qwen2 --prompts 256,512 --tokens 200
    """
    from bench.interference.refusals import refuse_unmeasurable
    from bench.interference.suite import Setting, lengths_of, run

    setting = Setting(
        base_url=base_url,
        model=model,
        other=other,
        prompts=lengths_of(prompts),
        stream_tokens=tokens,
        repeat=repeat,
        seed=seed,
        label=label,
    )
    refuse_unmeasurable(setting)
    run(setting, json)
    return 0
