"""The routes that are measured: what is asked of each, and how much of an answer is there."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from aegis.core.errors import UserError
from aegis.core.ids import ModelId
from bench.lab.proxy.model import AT_ONCE, AT_ONCE_MESSAGES, QUESTION, VECTORS, WORD

_MESSAGES = [{"role": "user", "content": QUESTION}]


@dataclass(frozen=True, slots=True)
class Route:
    """`asked` words a request for so many tokens. `token` is found once for each token of a stream; `whole` is what of
    an answer in one piece is of its length. `provider` is the one of LiteLLM that sends the route on as it came."""

    name: str
    path: str
    model: ModelId
    provider: str
    asked: Callable[[int], Mapping[str, Any]]
    token: re.Pattern[bytes]
    whole: re.Pattern[bytes]
    streams: bool = True

    def body(self, *, tokens: int, stream: bool, model: ModelId | None = None) -> bytes:
        """A request's."""
        streaming = {"stream": stream} if self.streams else {}
        return msgspec.json.encode({"model": model or self.model, **self.asked(tokens), **streaming})

    def length(self, reply: bytes) -> int:
        """The tokens or the values of an answer."""
        if streamed := self.token.findall(reply):
            return len(b"".join(streamed)) // len(WORD)
        found = self.whole.search(reply)
        return len(found[1]) // len(WORD) if found and self.streams else found[1].count(b",") + 1 if found else 0


CHAT = Route(
    "chat",
    "/v1/chat/completions",
    AT_ONCE,
    "openai",
    lambda tokens: {"messages": _MESSAGES, "max_tokens": tokens},
    token=re.compile(rb'"content": ?"([^"]+)"'),
    whole=re.compile(rb'"content": ?"([^"]+)"'),
)
MESSAGES = Route(
    "messages",
    "/v1/messages",
    AT_ONCE_MESSAGES,
    "anthropic",
    lambda tokens: {"messages": _MESSAGES, "max_tokens": tokens},
    token=re.compile(rb'"text_delta", ?"text": ?"([^"]+)"'),
    whole=re.compile(rb'"text": ?"([^"]+)"'),
)
RESPONSES = Route(
    "responses",
    "/v1/responses",
    AT_ONCE,
    "openai",
    lambda tokens: {"input": QUESTION, "max_output_tokens": tokens},
    token=re.compile(rb'"delta": ?"([^"]+)"'),
    whole=re.compile(rb'"text": ?"([^"]+)"'),
)
EMBEDDINGS = Route(
    "embeddings",
    "/v1/embeddings",
    VECTORS,
    "openai",
    lambda tokens: {"input": QUESTION},
    token=re.compile(rb"(?!)"),
    whole=re.compile(rb'"embedding": ?\[([^\]]+)\]'),
    streams=False,
)
ROUTES = {route.name: route for route in (CHAT, MESSAGES, RESPONSES, EMBEDDINGS)}


def routes_named(names: str) -> list[Route]:
    """The routes that are named, with commas between. Raises UserError."""
    asked = [name.strip() for name in names.split(",")]
    if unknown := [name for name in asked if name not in ROUTES]:
        raise UserError(f"--routes {unknown[0]}: expected some of {', '.join(ROUTES)}, with commas", param="routes")
    return [ROUTES[name] for name in asked]
