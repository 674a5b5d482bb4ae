"""The cost of structured output, and a check that it keeps its word: `aegis lab structured`.

The same requests go with a JSON schema and without to one server, A B, B A, …, so that other work of the machine
affects both alike. Then come answers to schemas drawn at random, each of which has to satisfy its own.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import msgspec
from msgspec import Struct
from rich.console import Console

from aegis.core.errors import UserError, install_advice
from bench.common import result_files
from bench.common.figures import Figure, at_least, at_most
from bench.common.machine import Machine, describe
from bench.common.served import served
from bench.lab.random_schemas import Schema, random_schema

BATCH = 8
ROUNDS = 9
SCHEMAS = 200
RATIO_MAX = 1.1
_TOKENS = 160
_DEPTH = 2
_WAIT_S = 600.0
_OPTIONS = ("--mixed", "1")  # so that all rows are of one batch
_PERSON: Schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "city": {"enum": ["Oslo", "Lima", "Kyoto"]},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "city", "tags"],
    "additionalProperties": False,
}
_PEOPLE: Schema = {"type": "array", "items": _PERSON, "minItems": _TOKENS}
"""Longer than any answer here, so that no row of a batch ends before the others."""


class Round(Struct, frozen=True):
    """`itl_s` is the time from one token of a request to its next, while all of the batch were under way."""

    model: str
    itl_s: float


class Answer(Struct, frozen=True):
    """To the schema drawn with `seed`. `cut`: it came to the end of the context first."""

    seed: int
    model: str
    valid: bool
    cut: bool


class Result(Struct, frozen=True):
    machine: Machine
    figures: tuple[Figure, ...]
    held: tuple[Round, ...]
    free: tuple[Round, ...]
    """The request at the same place was sent right before or after the one in `held`, to the same model."""
    answers: tuple[Answer, ...]


def run(
    json_path: Path | None = None,
    *,
    batch: int = BATCH,
    rounds: int = ROUNDS,
    schemas: int = SCHEMAS,
    options: Sequence[str] = (),
) -> Result:
    """Measures, prints the figures and writes all to `json_path`: so many rounds with each model. Raises UserError."""
    if json_path:
        result_files.check(json_path)
    validate = _validator()
    with served([*_OPTIONS, *options]) as url:
        held, free = asyncio.run(_rounds(url, batch, rounds))
        answers = asyncio.run(_answers(url, schemas, validate))
    result = Result(describe(), _figures(batch, held, free, answers), held, free, answers)
    console = Console(markup=False, highlight=False)
    for figure in result.figures:
        console.print(f"{figure.name:52} {figure.value:10.4g} {figure.unit} {figure.wanted}".rstrip())
    if json_path:
        result_files.write_json(json_path, result)
    return result


def _figures(batch: int, held: Sequence[Round], free: Sequence[Round], answers: Sequence[Answer]) -> tuple[Figure, ...]:
    ratio = median(with_it.itl_s / without.itl_s for with_it, without in zip(held, free, strict=True))
    whole = [answer for answer in answers if not answer.cut]
    return (
        Figure(f"inter-token latency, batch {batch}", 1e3 * median(x.itl_s for x in free), "ms"),
        Figure("the same, held to a JSON schema", 1e3 * median(x.itl_s for x in held), "ms"),
        at_most("held to a schema ÷ not, median of pairs", ratio, "", RATIO_MAX),
        Figure("schemas drawn", len(answers), ""),
        Figure("answers that the context ended first", len(answers) - len(whole), ""),
        at_least("of the others, those that satisfy their schema", _share([a.valid for a in whole]), "", 1.0),
    )


def _share(kept: Sequence[bool]) -> float:
    return sum(kept) / len(kept) if kept else 0.0


# --- latency --------------------------------------------------------------------------------------------------------


async def _rounds(url: str, batch: int, rounds: int) -> tuple[tuple[Round, ...], tuple[Round, ...]]:
    sides: tuple[list[Round], list[Round]] = ([], [])
    async with _client(url) as client:
        for model in await _models(client):
            for is_held in (True, False):
                await _round(client, model, batch, is_held)  # weights and grammar are there
            for number in range(rounds):
                for is_held in (True, False) if number % 2 else (False, True):
                    sides[not is_held].append(await _round(client, model, batch, is_held))
    return tuple(sides[0]), tuple(sides[1])


async def _round(client: httpx.AsyncClient, model: str, batch: int, is_held: bool) -> Round:
    streams = await asyncio.gather(*[_stream(client, model, number, is_held) for number in range(batch)])
    start_s, stop_s = max(times[0] for times in streams), min(times[-1] for times in streams)
    tokens = sum(start_s < at_s <= stop_s for times in streams for at_s in times)
    return Round(model, (stop_s - start_s) * batch / max(tokens, 1))


async def _stream(client: httpx.AsyncClient, model: str, number: int, is_held: bool) -> list[float]:
    """The time of each token."""
    body = _chat(model, f"Tell me of {number + 2} people.") | {"max_tokens": _TOKENS, "temperature": 0}
    body |= {"stream": True, "return_token_ids": True} | (_format(_PEOPLE) if is_held else {"ignore_eos": True})
    times: list[float] = []
    async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        if reply.is_error:
            raise UserError(f"the server refused: {(await reply.aread()).decode(errors='replace')[:300]}")
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                at_s = time.monotonic()
                for choice in msgspec.json.decode(line.removeprefix("data: "))["choices"]:
                    times += [at_s] * len(choice.get("token_ids") or ())
    assert len(times) == _TOKENS, f"a stream had {len(times)} tokens"
    return times


# --- validity -------------------------------------------------------------------------------------------------------


async def _answers(url: str, schemas: int, validate: Any) -> tuple[Answer, ...]:
    places = asyncio.Semaphore(BATCH)

    async def one(client: httpx.AsyncClient, seed: int, model: str) -> Answer:
        async with places:
            return await _answer(client, seed, model, validate)

    async with _client(url) as client:
        models = await _models(client)
        return tuple(await asyncio.gather(*[one(client, seed, models[seed % len(models)]) for seed in range(schemas)]))


async def _answer(client: httpx.AsyncClient, seed: int, model: str, validate: Any) -> Answer:
    schema = random_schema(random.Random(seed), depth=_DEPTH)
    body = _chat(model, f"Story {seed}.") | _format(schema) | {"seed": seed, "temperature": 1.0}
    reply = await client.post("/v1/chat/completions", json=body)
    if reply.is_error:
        raise UserError(f"the schema of seed {seed} was refused: {reply.text[:300]}")
    [choice] = reply.json()["choices"]
    if choice["finish_reason"] != "stop":
        return Answer(seed, model, valid=False, cut=True)
    return Answer(seed, model, valid=_satisfies(choice["message"]["content"], schema, validate), cut=False)


def _satisfies(text: str, schema: Schema, validate: Any) -> bool:
    try:
        return bool(validate(schema).is_valid(msgspec.json.decode(text)))
    except msgspec.DecodeError:
        return False


def _validator() -> Any:
    """Raises UserError."""
    try:
        from jsonschema import Draft202012Validator
    except ImportError:
        raise UserError(f"answers are judged by jsonschema, which is missing; {install_advice('bench')}") from None
    return Draft202012Validator


# --- requests -------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _client(url: str) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=_WAIT_S, limits=limits, trust_env=False) as client:
        yield client


async def _models(client: httpx.AsyncClient) -> list[str]:
    return [model["id"] for model in (await client.get("/v1/models")).json()["data"]]


def _chat(model: str, text: str) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text}]}


def _format(schema: Schema) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}
