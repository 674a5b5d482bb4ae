"""Large requests leave the event loop to others."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx
import pytest

from proxy.http.openai import tokenize
from proxy.http.request import prompts
from tests.unit.proxy.http.scripted import byte_text, calling, market


class Watched:
    """Notes which threads its function is called in."""

    def __init__(self, of: Any) -> None:
        self._of = of
        self.threads: set[int] = set()

    def __call__(self, *arguments: Any) -> Any:
        self.threads.add(threading.get_ident())
        return self._of(*arguments)


@pytest.mark.parametrize(
    ("path", "module", "body"),
    [
        ("/v1/completions", prompts, {"prompt": [120] * 4000}),
        ("/v1/completions", prompts, {"prompt": [[120] * 40] * 100}),
        ("/detokenize", tokenize, {"tokens": [120] * 4000}),
    ],
    ids=["a long prompt", "many prompts", "detokenize"],
)
def test_many_token_ids_are_checked_in_another_thread(
    path: str, module: Any, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(module.checked_token_ids)
    monkeypatch.setattr(module, "checked_token_ids", watched)

    async def call(client: httpx.AsyncClient) -> None:
        await client.post(path, json=body | {"model": "m"})

    calling(market(), call)
    assert len(watched.threads) == 1
    assert threading.get_ident() not in watched.threads


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/tokenize", {"prompt": "x"}),
        ("/tokenize", {"messages": [{"role": "user", "content": "x"}]}),
    ],
)
def test_no_text_of_a_client_is_tokenized_or_rendered_in_this_process(path: str, body: dict[str, Any]) -> None:
    text = byte_text()
    source = text.source()

    class Elsewhere(type(text)):  # type: ignore[misc]
        encode = render_chat = None

    text.__class__ = Elsewhere
    assert text.source() == source
    behind = market(lambda prompt, sampling: [asyncio.get_running_loop().create_future()], text=text)

    async def call(client: httpx.AsyncClient) -> int:
        asking = asyncio.create_task(client.post(path, json=body | {"model": "m"}))
        while not behind.submitted and not asking.done():
            await asyncio.sleep(0)
        asking.cancel()
        return asking.result().status_code if asking.done() else 200

    assert calling(behind, call) == 200


def test_others_come_in_between_the_sequences_of_one_call() -> None:
    behind = market()

    async def call(client: httpx.AsyncClient) -> int:
        task = asyncio.create_task(client.post("/v1/completions", json={"model": "m", "prompt": "x", "n": 128}))
        while not behind.submitted:
            await asyncio.sleep(0)
        submitted = len(behind.submitted)
        await task
        return submitted

    assert calling(behind, call) < 128
    assert len(behind.submitted) == 128
