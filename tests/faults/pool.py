"""A server of several instances and proxies, with whatever it speaks to: what faults are done to."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tests import brokers
from tests.live.server import Server, launched, processes_of
from tests.redis_server import redis_server

INSTANCES = ("--prefill", "2", "--decode", "2")
"""So that of each kind another one is left."""

MARKET_OPTIONS = ("--dtype", "float32", "--slo", "ttft=1,tbt=0.1", "--debug-memory")
ENVIRONMENT = {"AEGIS_TELEMETRY_TOKEN_TIMES": "true"}


class Part(Protocol):
    """Redis or the broker."""

    def kill(self) -> None: ...

    def start(self) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...


class Embedded:
    """The server's own, known by a word of its command line; it is started again by the server."""

    def __init__(self, server: Server, word: str) -> None:
        self._server = server
        self._word = word

    @property
    def pid(self) -> int:
        (pid,) = [pid for pid, command in processes_of(self._server.process.pid).items() if self._word in command]
        return pid

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def start(self) -> None:
        pass

    def pause(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


@dataclass(frozen=True, slots=True)
class Pool:
    """`kind` says whose Redis and broker they are: embedded or external."""

    kind: str
    server: Server
    redis: Part
    broker: Part

    def pid_of(self, name: str) -> int:
        """Of an instance, one of its ranks, or a proxy."""
        return self.server.pid_of(name)


@contextmanager
def opened(
    kind: str, directory: Path, cache: Path, *options: str, environment: Mapping[str, str] = {}
) -> Iterator[Pool]:
    with ExitStack() as stack:
        own: list[Part] = []
        if kind == "external":
            directory.mkdir(parents=True, exist_ok=True)
            redis = stack.enter_context(redis_server("redis-server", directory))
            broker = stack.enter_context(brokers.running("mosquitto", directory / "broker"))
            options += ("--redis", redis.url, "--mqtt", broker.url)
            own = [redis, broker]
        options += MARKET_OPTIONS
        server = stack.enter_context(launched(directory, cache, *options, environment={**ENVIRONMENT, **environment}))
        server.wait_for_ready()
        redis_part, broker_part = own or [Embedded(server, "valkey-server"), Embedded(server, "control.broker_process")]
        yield Pool(kind, server, redis_part, broker_part)
