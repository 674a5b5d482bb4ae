"""Bad input gets a clear error and harms nothing: what was asked rightly before and after is answered."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.live.market import CONTEXT_TOKENS
from tests.live.server import WAIT_S, Server
from tests.long_forms import first_of, first_rows_of

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GOOD: dict[str, Any] = {"model": "llama", "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0}


def good(**changes: Any) -> dict[str, Any]:
    return GOOD | changes


BAD: list[tuple[str, dict[str, Any], int, list[str]]] = [
    (COMPLETIONS, good(model="lama"), 404, ["lama", "llama"]),
    (COMPLETIONS, good(model="Qwen2"), 404, ["qwen2", "qwen3"]),
    (COMPLETIONS, good(model=7), 400, ["model"]),
    (COMPLETIONS, good(prompt=None), 400, ["prompt"]),
    (COMPLETIONS, good(prompt=[]), 400, ["prompt"]),
    (COMPLETIONS, good(prompt=[5, "6"]), 400, ["prompt"]),
    (COMPLETIONS, good(prompt=[5, 320]), 400, ["prompt", "320"]),
    (COMPLETIONS, good(prompt=[-1]), 400, ["prompt"]),
    (COMPLETIONS, good(max_tokens="4"), 400, ["max_tokens"]),
    (COMPLETIONS, good(max_tokens=0), 400, ["max_tokens"]),
    (COMPLETIONS, good(max_tokens=True), 400, ["max_tokens"]),
    (COMPLETIONS, good(max_tokens=2.5), 400, ["max_tokens"]),
    (COMPLETIONS, good(min_tokens=5), 400, ["min_tokens"]),
    (COMPLETIONS, good(temperature=-1), 400, ["temperature"]),
    (COMPLETIONS, good(temperature=1e9), 400, ["temperature"]),
    (COMPLETIONS, good(top_p=0), 400, ["top_p"]),
    (COMPLETIONS, good(n=0), 400, ["n"]),
    (COMPLETIONS, good(n=10**6), 400, ["n"]),
    (COMPLETIONS, good(stop=[1]), 400, ["stop"]),
    (COMPLETIONS, good(logit_bias={"x": 1}), 400, ["logit_bias"]),
    (COMPLETIONS, good(logprobs=1000), 400, ["logprobs"]),
    (COMPLETIONS, good(temprature=1), 400, ["temprature", "temperature"]),
    (COMPLETIONS, good(stream="yes"), 400, ["stream"]),
    (COMPLETIONS, good(seed=2**80), 400, ["seed"]),
    (COMPLETIONS, good(prompt=[5] * 4000, max_tokens=100), 400, ["4000", "100", str(CONTEXT_TOKENS)]),
    (COMPLETIONS, good(model="gemma2", prompt=[5] * 1400, max_tokens=200), 400, ["1400", "200", "1536"]),
    (COMPLETIONS, good(max_tokens=10**9), 400, ["1000000000", str(CONTEXT_TOKENS)]),
    (CHAT, {"model": "llama"}, 400, ["messages"]),
    (CHAT, {"model": "llama", "messages": []}, 400, ["messages"]),
    (CHAT, {"model": "llama", "messages": "hello"}, 400, ["messages"]),
    (CHAT, {"model": "llama", "messages": [{"role": "user", "content": 5}]}, 400, ["messages"]),
    ("/models/load", {"source": "/nowhere/at/all"}, 400, ["/nowhere/at/all"]),
    ("/models/load", {}, 400, ["source"]),
    ("/models/unload", {"model": "nobody"}, 404, ["nobody"]),
    ("/nothing/here", {}, 404, ["/nothing/here"]),
]


@pytest.mark.parametrize(("path", "body", "status", "told"), first_rows_of(8, list(BAD)))
def test_it_is_refused_with_what_is_wrong(
    server: Server, path: str, body: dict[str, Any], status: int, told: list[str]
) -> None:
    reply = server.post(path, body)
    error = reply.json()["error"]
    assert reply.status_code == status, error
    assert error.keys() == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    assert [what for what in told if what not in error["message"]] == []
    works(server)


@pytest.mark.parametrize(
    "content",
    first_of(
        2,
        [
            b"",
            b"{",
            b"[]",
            b"null",
            b'"text"',
            b"\xff\xfe",
            b'{"model": "llama", "model": ' + b"[" * 100_000,
            b"{}" * 3,
        ],
    ),
)
def test_what_is_no_json_object_is_refused(server: Server, content: bytes) -> None:
    for path in (COMPLETIONS, CHAT, "/models/load"):
        headers = {"content-type": "application/json"}
        reply = httpx.post(
            server.url + path, content=content, headers=headers, timeout=WAIT_S, trust_env=False, verify=False
        )
        assert reply.status_code == 400
        assert reply.json()["error"]["message"]
    works(server)


def works(server: Server) -> None:
    reply = server.post(COMPLETIONS, GOOD)
    assert reply.status_code == 200
    assert reply.json()["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
