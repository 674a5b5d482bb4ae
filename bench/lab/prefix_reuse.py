"""The time that prefix reuse saves a second chat turn: time to first token of both turns, with reuse and without:
`aegis lab prefix`.

Conversations with each of the demo market's models, one after the other: a first message of some 1 000 tokens, the
answer, a short second message. A second server that reuses nothing has the same conversations, and its answers have to
be the same, to the token.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from statistics import median

import httpx
import msgspec
from msgspec import Struct
from rich.console import Console

from aegis.core.rng import Stream
from bench.common import result_files
from bench.common.figures import Figure, at_least, at_most
from bench.common.machine import Machine, describe
from bench.common.served import served

CONVERSATIONS = 5
SHARED_TOKENS = 1_000
RATIO_MAX = 0.3
_ANSWER_TOKENS = 16
_WAIT_S = 600.0
_KEPT_S = 0.05
_WORDS = ("the", "lamp", "bread", "star", "boat", "tree", "clock", "stage", "honey", "wind", "door", "letter", "winter")


class Turn(Struct, frozen=True):
    """A turn as the client sees it. `cached_tokens` of its prompt were not prefilled."""

    first_token_s: float
    prompt_tokens: int
    cached_tokens: int
    tokens: tuple[int, ...]
    text: str


class Conversation(Struct, frozen=True):
    model: str
    first: Turn
    second: Turn

    @property
    def ratio(self) -> float:
        return self.second.first_token_s / self.first.first_token_s


class Result(Struct, frozen=True):
    machine: Machine
    figures: tuple[Figure, ...]
    reusing: tuple[Conversation, ...]
    bare: tuple[Conversation, ...]


def run(json_path: Path | None = None, *, conversations: int = CONVERSATIONS, options: Sequence[str] = ()) -> Result:
    """Measures, prints the figures and writes all to `json_path`: so many conversations with each model. `options` are
    for both servers. Raises UserError."""
    if json_path:
        result_files.check(json_path)
    with served([*options]) as url:
        reusing = tuple(_converse(url, conversations))
    with served([*options, "--prefix-reuse", "off"]) as url:
        bare = tuple(_converse(url, conversations))
    same = [a.second.tokens == b.second.tokens and a.first.tokens == b.first.tokens for a, b in _paired(reusing, bare)]
    shared = [a.second.cached_tokens for a in reusing]
    figures = (
        Figure("time to first token, first turn", 1e3 * median(c.first.first_token_s for c in reusing), "ms"),
        Figure("time to first token, second turn", 1e3 * median(c.second.first_token_s for c in reusing), "ms"),
        Figure("the same where nothing is reused", 1e3 * median(c.second.first_token_s for c in bare), "ms"),
        at_most("second turn ÷ first", median(c.ratio for c in reusing), "", RATIO_MAX),
        Figure("the same where nothing is reused", median(c.ratio for c in bare), ""),
        at_least("tokens not prefilled in a second turn, the least", min(shared), "tokens", SHARED_TOKENS),
        at_least("answers that are the same", sum(same) / len(same), "", 1.0),
    )
    result = Result(describe(), figures, reusing, bare)
    console = Console(markup=False, highlight=False)
    for figure in figures:
        console.print(f"{figure.name:50} {figure.value:10.4g} {figure.unit} {figure.wanted}".rstrip())
    if json_path:
        result_files.write_json(json_path, result)
    return result


def _paired(
    some: Sequence[Conversation], others: Sequence[Conversation]
) -> Iterator[tuple[Conversation, Conversation]]:
    return zip(some, others, strict=True)


def _converse(url: str, conversations: int) -> Iterator[Conversation]:
    with httpx.Client(base_url=url, timeout=_WAIT_S, trust_env=False) as client:
        models = [model["id"] for model in client.get("/v1/models").json()["data"]]
        for model in models:
            _turn(client, model, [_message("user", "Hello.")])  # its weights are there
            for number in range(conversations):
                yield _conversation(client, model, number)


def _conversation(client: httpx.Client, model: str, number: int) -> Conversation:
    draws = Stream(number, "bench prefix", model)
    words = (_WORDS[draws.below(len(_WORDS))] for _ in range(SHARED_TOKENS * 2))
    messages = [_message("user", _text(client, model, words))]
    first = _turn(client, model, messages)
    _rest(client)
    messages += [_message("assistant", first.text), _message("user", "And then?")]
    second = _turn(client, model, messages)
    _rest(client)
    return Conversation(model, first, second)


def _text(client: httpx.Client, model: str, words: Iterator[str]) -> str:
    """A text of hardly more tokens than turns are to share."""
    text = " ".join(islice(words, SHARED_TOKENS // 8))
    while _count(client, model, text) < SHARED_TOKENS + 16:
        text += " " + " ".join(islice(words, 40))
    return text


def _count(client: httpx.Client, model: str, text: str) -> int:
    return int(client.post("/tokenize", json={"model": model, "prompt": text}).raise_for_status().json()["count"])


def _rest(client: httpx.Client) -> None:
    """Until what ended has been kept, if it is."""
    seen = None
    while seen != (seen := _kept(client)):
        time.sleep(_KEPT_S)


def _kept(client: httpx.Client) -> list[str]:
    return [line for line in client.get("/metrics").text.splitlines() if line.startswith("aegis:prefix_kept")]


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _turn(client: httpx.Client, model: str, messages: Sequence[dict[str, str]]) -> Turn:
    body = {"model": model, "messages": messages, "max_tokens": _ANSWER_TOKENS, "temperature": 0, "stream": True}
    body |= {"stream_options": {"include_usage": True}, "return_token_ids": True}
    first_s, tokens, text = 0.0, list[int](), ""
    began_s = time.monotonic()
    with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        reply.raise_for_status()
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = msgspec.json.decode(line.removeprefix("data: "))
            for choice in event["choices"]:
                first_s = first_s or time.monotonic() - began_s
                tokens += choice["token_ids"]
                text += choice["delta"].get("content", "")
            usage = event["usage"] or {}
    details = usage["prompt_tokens_details"]
    return Turn(first_s, usage["prompt_tokens"], details["cached_tokens"], tuple(tokens), text)
