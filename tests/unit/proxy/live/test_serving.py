"""New connections do not wait behind others that came before them in one moment."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack

import uvloop
from starlette.types import Receive, Scope, Send

from proxy.live.serving import ACCEPTED_AT_ONCE, acceptors, make_server

CONNECTIONS = 8 * ACCEPTED_AT_ONCE
TURNS_MAX = 16
"""Of the event loop, half of which would do."""


async def nothing(scope: Scope, receive: Receive, send: Send) -> None:
    pass


def test_many_connections_are_accepted_in_few_turns_of_the_loop() -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=CONNECTIONS)
    host, port = listener.getsockname()

    async def turns() -> int:
        server = make_server(nothing, host=host, port=port)
        serving = asyncio.create_task(server.serve(acceptors(listener)))
        while not server.started:
            await asyncio.sleep(0)
        count = 0
        while len(server.server_state.connections) < CONNECTIONS and count < 2 * CONNECTIONS:
            await asyncio.sleep(0)
            count += 1
        server.should_exit = True
        await serving
        return count

    with ExitStack() as stack:
        for _ in range(CONNECTIONS):
            stack.enter_context(socket.create_connection((host, port)))
        assert uvloop.run(turns()) <= TURNS_MAX
    assert listener.fileno() < 0, "it is closed with the server"
