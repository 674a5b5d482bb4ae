"""Requests that schemathesis draws from a running server's OpenAPI document never cause an error of the server."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.fuzzing import CASES, fuzz, operations
from tests.live.api.test_bad_input import works
from tests.live.server import WAIT_S, Server

ASKING = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
    "/tokenize",
    "/detokenize",
)
SHARE = 20 if CASES <= 500 else 1  # of the cases that the application alone is asked; real models take their time
TOKENS, CHOICES = 8, 2
_LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens")


@pytest.mark.parametrize("path", ASKING)
def test_nothing_that_is_asked_is_an_error_of_the_server(server: Server, path: str) -> None:
    document: dict[str, Any] = server.get("/openapi.json").json()
    (cases,) = [cases for of, _, cases in operations(document) if of == path]

    def send(case: Any) -> Any:
        if isinstance(case.body, dict):
            case.body |= _short(case.body, path)
        return case.call(base_url=server.url, timeout=WAIT_S)

    counts = fuzz(document, path, "post", -(-cases // SHARE), "llama", send)
    assert sum(counts.values()) > 0
    works(server)


def _short(body: dict[str, Any], path: str) -> dict[str, Any]:
    """What would only take long."""
    if not path.startswith("/v1/") or path.endswith("/count_tokens"):
        return {}
    longest = {name: body[name] for name in _LENGTHS if name in body}
    bounded = {name: min(value, TOKENS) if type(value) is int else value for name, value in longest.items()}
    choices = {"n": min(body["n"], CHOICES)} if type(body.get("n")) is int else {}
    return {"max_output_tokens" if path == "/v1/responses" else "max_tokens": TOKENS} | bounded | choices


@pytest.mark.parametrize("path", ASKING)
def test_ten_megabytes_are_refused_before_they_are_read(server: Server, path: str) -> None:
    body = b'{"model": "llama", "prompt": "' + b"x" * (10 << 20) + b'"}'
    reply = httpx.post(server.url + path, content=body, timeout=60, trust_env=False, verify=False)
    error = reply.json()["error"]
    assert (reply.status_code, error.get("code", "body_too_large")) == (413, "body_too_large")
    works(server)
