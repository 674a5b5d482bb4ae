"""The options of `aegis bench serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from aegis.server_url import url_option

_TOKENS_MAX = 10_000_000


def serve(
    base_url: Annotated[str, url_option("--base-url", "--url")],
    endpoint: Annotated[
        str, typer.Option(metavar="PATH", help="/v1/completions or /v1/chat/completions.")
    ] = "/v1/completions",
    api_key: Annotated[
        str | None, typer.Option(metavar="KEY", envvar="OPENAI_API_KEY", show_envvar=True, help="Key of the server.")
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Send to this one. May be repeated. [default: all that are served]"),
    ] = None,
    map: Annotated[
        Literal["name", "round-robin"] | None,
        typer.Option(
            help="Which served model stands for a model of the workload. [default: by name where all are served, in "
            "turn where none is]"
        ),
    ] = None,
    workload: Annotated[
        str | None, typer.Option(metavar="SPEC", help="Requests from a generator; docs/workloads.md has them.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Requests from a trace: .csv, .jsonl, either .gz.")
    ] = None,
    dataset_name: Annotated[
        Literal["random", "sharegpt", "burstgpt", "custom", "timed_trace"] | None,
        typer.Option(help="Requests from a data set, where no workload or trace is given. [default: random]"),
    ] = None,
    dataset_path: Annotated[Path | None, typer.Option(metavar="FILE", help="The data set.")] = None,
    timed_trace_sec_multiplier: Annotated[
        float | None,
        typer.Option(
            metavar="X", help="Seconds of a `timestamp` of a timed_trace; 0.001 for milliseconds. [default: 1]"
        ),
    ] = None,
    random_input_len: Annotated[
        int | None, typer.Option(metavar="N", min=1, max=_TOKENS_MAX, help="Tokens of a random prompt. [default: 1024]")
    ] = None,
    random_output_len: Annotated[
        int | None, typer.Option(metavar="N", min=1, max=_TOKENS_MAX, help="Tokens of its answer. [default: 128]")
    ] = None,
    random_range_ratio: Annotated[
        float | None,
        typer.Option(metavar="R", min=0, max=1, help="Both are drawn from [n(1 - R), n(1 + R)]. [default: 0]"),
    ] = None,
    sharegpt_output_len: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Tokens of an answer, instead of the data set's.")
    ] = None,
    custom_output_len: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Tokens of an answer, where a row does not say. [default: 256]"),
    ] = None,
    num_prompts: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Requests. [default: 1000 of a data set, else all]")
    ] = None,
    request_rate: Annotated[
        float | None, typer.Option(metavar="R", help="Requests of a data set per second. [default: all at once]")
    ] = None,
    burstiness: Annotated[
        float | None,
        typer.Option(metavar="K", help="Shape of the gaps between them: 1 is Poisson, less is burstier. [default: 1]"),
    ] = None,
    max_concurrency: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Requests under way at a time. [default: no limit]")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of everything that is drawn.")] = 0,
    ignore_eos: Annotated[
        bool | None,
        typer.Option("--ignore-eos/--no-ignore-eos", help="Answers go on to the last token. [default: with times]"),
    ] = None,
    prompt_as: Annotated[
        Literal["tokens", "text"], typer.Option(help="Prompts as token ids, or as about as many words.")
    ] = "tokens",
    extra_body: Annotated[
        str | None, typer.Option(metavar="JSON", help='Added to each request, like {"temperature": 0}.')
    ] = None,
    timeout: Annotated[
        float, typer.Option(metavar="S", help="A request fails after so many seconds in which nothing came.")
    ] = 600.0,
    slo: Annotated[str, typer.Option(metavar="SLO", help="When tokens are due, in seconds.")] = "ttft=10,tbt=0.1",
    goodput: Annotated[
        list[str] | None,
        typer.Option(metavar="LIMITS", help="Limits that a good request keeps, in ms, like ttft:500,tpot:50."),
    ] = None,
    percentile_metrics: Annotated[
        str, typer.Option(metavar="NAMES", help="Some of ttft, tpot, itl, e2el.")
    ] = "ttft,tpot,itl",
    metric_percentiles: Annotated[str, typer.Option(metavar="PS", help="Percentiles to show.")] = "99",
    label: Annotated[str | None, typer.Option(metavar="TEXT", help="A name for the run, in its result.")] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the result to this file.")] = None,
    save_result: Annotated[
        bool, typer.Option("--save-result", help="Write the result to --result-filename, in --result-dir.")
    ] = False,
    result_dir: Annotated[Path, typer.Option(metavar="DIR")] = Path(),
    result_filename: Annotated[
        str | None, typer.Option(metavar="NAME", help="[default: made of rate, model and date]")
    ] = None,
    records: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the outcome of each request, one JSON a line.")
    ] = None,
) -> int:
    """Measure a server with OpenAI's API under requests to many models.

    Each request is sent at its time, whatever became of the others. Exits 1 where all of them failed.
    docs/benchmarking.md explains what is measured.

    \b
    Examples:
      aegis bench serve --num-prompts 100 --request-rate 4 --random-input-len 64 --random-output-len 32
      aegis bench serve --trace trace.csv --slo ttft=2,tbt=0.05 --json live.json --records live.jsonl
      aegis bench serve --endpoint /v1/chat/completions --dataset-name sharegpt --dataset-path sharegpt.json
    """
    given: dict[str, Any] = dict(locals())
    from bench.serve.options import settings_of
    from bench.serve.suite import run

    return 0 if run(settings_of(given))["completed"] else 1
