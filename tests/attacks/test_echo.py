"""A prompt that is told again in many choices keeps nobody waiting."""

from __future__ import annotations

import asyncio
from time import monotonic

import httpx
import pytest

from aegis.core.request import FinishReason
from proxy.http.market import Delta, Finished, PromptScores
from tests.long_forms import first_of
from tests.unit.proxy.http.scripted import calling, market, spec, tokens

pytestmark = pytest.mark.alone

PATH = "/v1/completions"
LATE_S = 0.25
"""How much later than due the event loop may come to something."""


@pytest.mark.parametrize("stream", first_of(1, [True, False]))
def test_an_echoed_prompt_of_many_choices_keeps_nobody_waiting(stream: bool) -> None:
    """Half a million of its tokens are told."""
    deliveries = [PromptScores(tokens("a" * 1999)), Delta(tokens("y")), Finished(FinishReason.LENGTH)]
    behind = market(lambda *_: deliveries)
    behind.served["m"].spec = spec("m", vocab_size=300, context_tokens=4096)
    body = {"model": "m", "prompt": [97] * 2000, "echo": True, "logprobs": 0, "n": 128, "stream": stream}
    late_s = 0.0

    async def watch() -> None:
        nonlocal late_s
        while True:
            began_s = monotonic()
            await asyncio.sleep(0.01)
            late_s = max(late_s, monotonic() - began_s - 0.01)

    async def calls(client: httpx.AsyncClient) -> list[httpx.Response]:
        watching = asyncio.create_task(watch())
        try:
            return list(await asyncio.gather(*(client.post(PATH, json=body) for _ in range(2))))
        finally:
            watching.cancel()

    for reply in calling(behind, calls):
        assert reply.status_code == 200
        assert reply.text.count('"text_offset"') >= 128
    assert late_s <= LATE_S
