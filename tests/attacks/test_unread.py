"""Answers that nobody reads take little, however many there are: streams, whole answers, and what `/tokenize` says."""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack
from select import select
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.attacks.harness import under_attack
from tests.attacks.wire import request
from tests.live.server import WAIT_S, Server, eventually
from tests.long_forms import first_of

pytestmark = pytest.mark.alone

READERS = 16
TEXT = "the cat and the hat " * 40_000
STREAM: dict[str, Any] = {"model": "llama", "prompt": [5, 6], "max_tokens": 1000, "ignore_eos": True}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "streams": ("/v1/completions", STREAM | {"stream": True, "logprobs": 20}),
    "whole answers": ("/v1/completions", STREAM | {"logprobs": 20}),
    "token ids": ("/tokenize", {"model": "llama", "prompt": TEXT}),
}


@pytest.mark.long
@pytest.mark.parametrize("name", first_of(1, list(BODIES)))
def test_answers_that_nobody_reads_take_little(server: Server, name: str) -> None:
    path, body = BODIES[name]
    address, sent = urlsplit(server.url), request(path, json.dumps(body).encode())
    with under_attack(server, f"{READERS} that read no {name}"), ExitStack() as stack:
        readers = [stack.enter_context(socket.socket()) for _ in range(READERS)]
        for reader in readers:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            reader.settimeout(WAIT_S)
            reader.connect((address.hostname, address.port))
            reader.sendall(sent)

        def all_are_made() -> bool:
            """An honest stream may run beside."""
            begun, _, _ = select(readers, [], [], 0)
            return len(begun) == READERS and server.metrics().total("num_requests_running") <= 1

        eventually(all_are_made, "all answers are made")
