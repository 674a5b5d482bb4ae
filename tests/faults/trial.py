"""A trial: clients whose every token is known, and what happens to the server while they are answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from uuid import uuid4

import httpx

from tests.live.cases import Case
from tests.live.server import Server
from tests.live.streams import Body, Stream, client_of, until

CONNECTION = "connection"
"""The code of an answer that broke off with its connection."""

ASKED_AGAIN = (CONNECTION, "request_in_flight", "store_unavailable")
_AGAIN_S = 0.25
_ANSWERED_S = 240.0

Strike = Callable[[], Awaitable[None]]


@dataclass(slots=True)
class Client:
    """One request, which is asked again under its id until it is answered, or until an answer says that it will not
    be."""

    body: Body
    expected: list[int]
    attempts: list[Stream] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """That the present attempt has brought."""
        return len(self.attempts[-1].tokens) if self.attempts else 0

    async def run(self, http: httpx.AsyncClient) -> None:
        while True:
            stream = Stream(self.body)
            self.attempts.append(stream)
            try:
                await stream.run(http)
            except httpx.TransportError as error:
                stream.error = {"code": CONNECTION, "message": type(error).__name__}
            if stream.error is None or stream.error["code"] not in ASKED_AGAIN:
                return
            await asyncio.sleep(_AGAIN_S)


@dataclass(slots=True)
class Trial:
    """`struck_s` is when it happened, in seconds since 1970, which is what the server's log has."""

    server: Server
    moment: float
    clients: list[Client]
    struck_s: float = 0.0
    struck_monotonic_s: float = 0.0

    @property
    def broken(self) -> list[Client]:
        """Whose first answer broke off."""
        return [client for client in self.clients if len(client.attempts) > 1]

    def verify(self, *, died: Collection[str] = ()) -> None:
        """Everyone has one whole answer, token for token. Nobody's connection broke but to the proxies that died; what
        had come till then was right."""
        for client in self.clients:
            *earlier, last = client.attempts
            assert (last.error, last.done) == (None, True), client.body
            assert last.tokens == client.expected, client.body
            for attempt in earlier:
                assert attempt.error is not None
                # A proxy may die between the last event of an answer and the end of its connection.
                assert not attempt.done or attempt.error["code"] == CONNECTION
                assert attempt.tokens == client.expected[: len(attempt.tokens)], client.body
                if attempt.error["code"] == CONNECTION:
                    assert attempt.proxy in (*died, *([""] if died else [])), client.body


async def nothing() -> None:
    """Where what is wrong is so from the beginning."""


def undergo(server: Server, cases: Sequence[Case], moment: float, strike: Strike) -> Trial:
    """Asks everything at once and strikes when that share of all tokens has come. Returns when all are answered."""
    name = uuid4().hex[:8]
    clients = [Client(case.body | {"request_id": f"{name}-{n}"}, case.expected.tokens) for n, case in enumerate(cases)]
    trial = Trial(server, moment, clients)
    enough = moment * sum(len(client.expected) for client in clients)

    async def main() -> None:
        async with client_of(server.url) as http, asyncio.timeout(_ANSWERED_S), asyncio.TaskGroup() as group:
            for client in clients:
                group.create_task(client.run(http))
            await until(lambda: sum(client.tokens for client in clients) >= enough, "the moment to strike")
            trial.struck_s, trial.struck_monotonic_s = time.time(), time.monotonic()
            await strike()

    asyncio.run(main())
    return trial
