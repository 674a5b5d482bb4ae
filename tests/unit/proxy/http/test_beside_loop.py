"""Large requests leave the event loop to others."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx
import pytest

from aegis.models.text import TextModel
from tests.unit.proxy.http.scripted import byte_text, calling, market


class Watched(TextModel):
    """Notes which threads it worked in."""

    token_characters_max = 20

    def __init__(self) -> None:
        self._of = byte_text()
        self.threads: set[int] = set()

    @property
    def chat_template(self) -> str:
        return "{{ messages }}"

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.threads.add(threading.get_ident())
        return self._of.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, tokens: Any, *, skip_special_tokens: bool = True) -> str:
        self.threads.add(threading.get_ident())
        return self._of.decode(tokens, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": ["x" * 20] * 200}),
        ("/v1/completions", {"prompt": "x" * 4000}),
        ("/tokenize", {"prompt": "x" * 4000}),
        ("/detokenize", {"tokens": [120] * 4000}),
    ],
    ids=["many prompts", "a long prompt", "tokenize", "detokenize"],
)
def test_long_texts_are_worked_on_in_one_other_thread(path: str, body: dict[str, Any]) -> None:
    text = Watched()
    behind = market(text=text)
    behind.served["m"].script = lambda prompt, sampling: []

    async def call(client: httpx.AsyncClient) -> set[int]:
        task = asyncio.create_task(client.post(path, json=body | {"model": "m"}))
        while not text.threads and not task.done():
            await asyncio.sleep(0)
        task.cancel()
        return text.threads

    threads = calling(behind, call)
    assert len(threads) == 1
    assert threading.get_ident() not in threads


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
