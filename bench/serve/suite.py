"""`aegis bench serve`: any server with OpenAI's API under a workload of requests to many models."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from math import isfinite
from typing import Any

import aiohttp
import msgspec
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from aegis.core.ids import RequestId
from aegis.core.model import Slo
from aegis.telemetry import files
from aegis.telemetry.records import Record
from bench.common.result_files import check_all, make_directory, write
from bench.serve.client import Client, open_session, replay
from bench.serve.models import Card, choose, known_token_ids, root_of, served_models
from bench.serve.plan import Outcome, Planned, digest
from bench.serve.prompts import Draws, Wording
from bench.serve.results import summarise
from bench.serve.settings import Settings
from bench.serve.table import table
from bench.serve.workload import Asked, plan_for, read


def record_of(outcome: Outcome, slo: Slo) -> Record:
    """What became of a request of a live run, as a simulation tells it. Times are since the start of the run, the
    arrival is when it was to be sent."""
    times_ns = outcome.token_times_ns
    return Record(
        request=RequestId(outcome.request),
        model=outcome.planned.model,
        arrival_ns=outcome.planned.at_ns,
        input_tokens=outcome.input_tokens,
        output_tokens=outcome.owed_tokens,
        ended="failed" if outcome.failure else "finished",
        on_time=outcome.on_time(slo),
        first_ns=times_ns[0] if times_ns else None,
        last_ns=times_ns[-1] if times_ns else None,
        token_times_ns=times_ns,
    )


def run(settings: Settings) -> dict[str, Any]:
    """Sends the requests, prints what was measured and writes the files. Raises UserError."""
    if settings.directory is not None:
        make_directory(settings.directory, parents=True)
    check_all([*settings.files, *([settings.records] if settings.records else [])])
    asked = read(settings)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        plan, outcomes = runner.run(_run(settings, asked))
    result = _head(settings, plan) | summarise(outcomes, settings.measures)
    print(*table(result), sep="\n")
    for file in settings.files:
        write(file, msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    if settings.records is not None:
        files.write(settings.records, (record_of(outcome, settings.measures.slo) for outcome in outcomes))
    return result


async def _run(settings: Settings, asked: Asked) -> tuple[list[Planned], list[Outcome]]:
    url = root_of(settings.base_url)
    async with open_session(settings.api_key, silence_s=settings.silence_s) as session:
        served = choose(await served_models(session, url), settings.models)
        plan = plan_for(settings, asked, served)
        wording = await _wording(settings, session, plan, served)
        client = Client(session, url + settings.endpoint, settings.api_key)
        with _progress(len(plan)) as progress:
            task = progress.add_task("requests", total=len(plan))
            outcomes = await replay(
                client,
                plan,
                wording.body,
                max_concurrency=settings.max_concurrency,
                ended=lambda outcome: progress.advance(task),
            )
    return plan, outcomes


async def _wording(
    settings: Settings, session: aiohttp.ClientSession, plan: Sequence[Planned], served: Sequence[Card]
) -> Wording:
    token_ids = None
    if settings.prompt_as == "tokens" and not settings.chat:
        models = sorted({each.model for each in plan if each.text is None})
        token_ids = await known_token_ids(session, root_of(settings.base_url), models)
    return Wording(
        chat=settings.chat,
        draws=Draws(settings.seed, max(each.input_tokens for each in plan)),
        token_ids=token_ids,
        returning=frozenset(card.model for card in served if card.returns_token_ids),
        ignore_eos=settings.whole_answers,
        extra=settings.extra_body,
    )


def _progress(total: int) -> Progress:
    """Progress on standard error, if that is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _head(settings: Settings, plan: Sequence[Planned]) -> dict[str, Any]:
    """A description of the run in the words of `vllm bench serve`, and the identity of the workload."""
    backend = "openai-chat" if settings.chat else "openai"
    models = sorted({each.model for each in plan})
    rate = None if settings.timed else settings.request_rate
    slo = settings.measures.slo
    return {
        "date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": backend,
        "backend": backend,
        "label": settings.label,
        "model_id": ",".join(models),
        "tokenizer_id": ",".join(models),
        "num_prompts": len(plan),
        "request_rate": rate if rate is None or isfinite(rate) else "inf",
        "burstiness": settings.burstiness,
        "max_concurrency": settings.max_concurrency,
        "seed": settings.seed,
        "workload": digest(plan),
        "slo": {"ttft_s": slo.ttft_ns / 1e9, "tbt_s": slo.tbt_ns / 1e9},
    }
