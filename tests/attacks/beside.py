"""Honest requests while others attack: asked again and again, each with how long it took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import Any

import httpx

from tests.live.server import WAIT_S, Server

REST_S = 0.05


@dataclass(slots=True)
class Beside:
    took_s: list[float] = field(default_factory=list)
    statuses: set[int] = field(default_factory=set)

    @property
    def worst_s(self) -> float:
        return max(self.took_s)


@contextmanager
def asked_beside(server: Server, path: str, body: dict[str, Any], **headers: str) -> Iterator[Beside]:
    """Asks until the block has ended, at least once."""
    seen, over = Beside(), Event()

    def ask() -> None:
        with httpx.Client(
            base_url=server.url, headers=headers, timeout=WAIT_S, trust_env=False, verify=False
        ) as client:
            while not seen.took_s or not over.is_set():
                began_s = time.monotonic()
                seen.statuses.add(client.post(path, json=body).status_code)
                seen.took_s.append(time.monotonic() - began_s)
                over.wait(REST_S)

    thread = Thread(target=ask)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()
    assert seen.took_s, "an honest request was not answered"


def for_seconds(seconds: float, once: Callable[[], int]) -> list[int]:
    """What came of doing it for so long, once at least."""
    until_s, came = time.monotonic() + seconds, [once()]
    while time.monotonic() < until_s:
        came.append(once())
    return came
