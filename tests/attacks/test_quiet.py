"""The harness finds nothing where nobody attacks, and what is wrong where something is."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

from tests.attacks.harness import HONEST, under_attack
from tests.attacks.wire import Wire, parsed, request
from tests.live.server import Server

pytestmark = pytest.mark.alone


def test_a_server_that_nobody_attacks_is_well(server: Server) -> None:
    with under_attack(server, "quiet") as report:
        time.sleep(0.5)  # nothing happens, for as long as it is watched
    assert report.streams and report.asked > 5


def test_a_proxy_that_stands_still_is_found(server: Server) -> None:
    def stand_still() -> None:
        with under_attack(server, "stopped"):
            os.kill(server.process.pid, signal.SIGSTOP)
            try:
                time.sleep(0.8)
            finally:
                os.kill(server.process.pid, signal.SIGCONT)

    with pytest.raises(AssertionError, match="/health took"):
        stand_still()


def test_responses_are_read_to_the_byte(server: Server) -> None:
    body = json.dumps(HONEST | {"max_tokens": 3, "stream": True}).encode()
    with Wire(server.url) as wire:
        wire.send(request("/health") + request("/v1/completions", body) + request("/health", method=b"HEAD"))
        heard = wire.hear(count=3, methods=(b"GET", b"POST", b"HEAD"))
    assert heard.statuses == [200, 200, 200] and not heard.rest and not heard.closed
    assert heard.responses[1].body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    "came",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nabc\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\nContent-Length: 0\n\n",
        b"HTTP/2 200 OK\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent Length: 0\r\n\r\n",
    ],
)
def test_what_is_not_quite_a_response_remains(came: bytes) -> None:
    assert parsed(came).rest
