"""A server under several times the load that it can serve, without and, at two proxies, with `--refuse-late`: who
cannot be served in time is told so, and whoever is served has a whole answer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec

from aegis.telemetry.records import REFUSED, Record
from tests.live.market import MARKET
from tests.live.server import Server, eventually, launched
from tests.live.streams import Body, client_of

ROUNDS = {False: 1, True: 5}  # by whether it refuses
BEATS = 8
OUTPUT_TOKENS = 50
GAP_S = 0.2


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    retry_after: str | None
    code: str | None
    tokens: int


async def _ask(client: httpx.AsyncClient, body: Body, after_s: float) -> Answer:
    await asyncio.sleep(after_s)
    reply = await client.post("/v1/completions", json=body)
    content = reply.json()
    code = content["error"]["code"] if reply.is_error else None
    tokens = 0 if reply.is_error else content["usage"]["completion_tokens"]
    return Answer(reply.status_code, reply.headers.get("retry-after"), code, tokens)


async def _ask_all(url: str, rounds: int) -> list[Answer]:
    """Requests of all models come together, in rounds; most to two of them."""
    names = list(MARKET)
    asked = [names[at % BEATS] if at < BEATS else names[at % 2] for at in range(2 * BEATS)]
    bodies = [
        {"model": name, "prompt": [5, 6, 7, 8], "max_tokens": OUTPUT_TOKENS, "ignore_eos": True} for name in asked
    ]
    async with client_of(url) as client, asyncio.TaskGroup() as group:
        tasks = [group.create_task(_ask(client, body, n * GAP_S)) for n in range(rounds) for body in bodies]
    return [task.result() for task in tasks]


def _records(server: Server, count: int) -> list[Record]:
    def told() -> list[Record]:
        return msgspec.json.Decoder(Record).decode_lines(server.get("/debug/records").content)

    eventually(lambda: len(told()) == count, "all have ended")
    return told()


def test_who_is_refused_is_told_when_to_come_again_and_all_others_are_answered(
    tmp_path: Path, cache: Path, checkpoints_dir: Path, tight_memory: str
) -> None:
    for refuses in ((), ("--refuse-late", "--proxies", "2")):
        options = ["--models", str(checkpoints_dir), "--dtype", "float32", "--device-memory", tight_memory]
        options += ["--slo", "ttft=0.2,tbt=0.005", "--mixed", "2", *refuses]
        with launched(tmp_path / "-".join(["server", *refuses]), cache, *options) as server:
            server.wait_for_ready()
            answers = asyncio.run(_ask_all(server.url, ROUNDS[bool(refuses)]))
            records = _records(server, len(answers))
            refused = [answer for answer in answers if answer.status == httpx.codes.TOO_MANY_REQUESTS]
            assert all(each.status == httpx.codes.OK for each in answers if each not in refused)
            assert all(each.tokens == OUTPUT_TOKENS for each in answers if each not in refused)
            served = [each for each in records if each.ended != REFUSED]
            assert len(served) == len(answers) - len(refused)
            assert bool(refused) == bool(refuses)
            for each in refused:
                assert each.code == "would_be_late" and each.retry_after and int(each.retry_after) >= 1
            told = server.metrics().total("requests_refused_total", reason="would_be_late") if refused else 0
            assert told == len(refused)
