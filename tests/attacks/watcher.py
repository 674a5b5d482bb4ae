"""Watches a server from a process of its own, so that what attacks it does not slow down who looks: asks its health,
reads its memory, streams honestly beside. Prints a line when it has begun, and what it saw when its input ends.

    python watcher.py '{"url": "http://127.0.0.1:8000", "session": 123, "body": {…}, "key": ""}'
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any
from urllib.parse import urlsplit

PERIOD_S = 0.05
REST_S = 0.2  # between two streams, or the machine is never idle
WAIT_S = 60.0
PROXIES = ("aegis.cli.main launch", "proxy.live.process")
INSTANCES = "aegis.instance.process"


class Watcher:
    def __init__(self, config: dict[str, Any]) -> None:
        self.address = urlsplit(config["url"]).netloc
        self.session = config["session"]
        self.body = config["body"]
        self.headers = {"Authorization": f"Bearer {config['key']}"} if config["key"] else {}
        self.over, self.begun = Event(), Event()
        self.lock = Lock()
        self.seen: dict[str, Any] = {
            "fresh_s": [],
            "kept_s": [],
            "late_s": 0.0,
            "memory": [],
            "others": [],
            "streams": [],
            "errors": [],
        }

    def run(self) -> dict[str, Any]:
        self.seen["memory"].append(memory_of(self.session)[0])
        jobs = [(job,) for job in (self._ask_fresh, self._ask_kept, self._read_memory, self._stream)]
        watches = [(self._wake, processor) for processor in os.sched_getaffinity(0)]
        threads = [Thread(target=self._guarded, args=job, daemon=True) for job in (*jobs, *watches)]
        for thread in threads:
            thread.start()
        while not self.begun.wait(PERIOD_S) and any(thread.is_alive() for thread in threads):
            pass
        sys.stdout.write("begun\n")
        sys.stdout.flush()
        sys.stdin.read()
        self.over.set()
        for thread in threads:
            thread.join(2 * WAIT_S)
        self.seen["memory"].append(memory_of(self.session)[0])
        return self.seen

    def _guarded(self, job: Callable[..., None], *arguments: int) -> None:
        try:
            job(*arguments)
        except (OSError, http.client.HTTPException, ValueError, AssertionError) as error:
            self._fail(f"{job.__name__}: {type(error).__name__} {error}")

    def _fail(self, what: str) -> None:
        with self.lock:
            self.seen["errors"].append(what)

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.address, timeout=WAIT_S)

    def _ask_fresh(self) -> None:
        while not self.over.is_set():
            connection = self._connect()
            self._ask(connection, self.seen["fresh_s"])
            connection.close()
            self._pause()

    def _ask_kept(self) -> None:
        connection = self._connect()
        while not self.over.is_set():
            self._ask(connection, self.seen["kept_s"])
            self._pause()

    def _ask(self, connection: http.client.HTTPConnection, into: list[float]) -> None:
        began_s = time.monotonic()
        connection.request("GET", "/health", headers=self.headers)
        reply = connection.getresponse()
        reply.read()
        into.append(time.monotonic() - began_s)
        assert reply.status == 200, f"/health answers {reply.status}"

    def _pause(self) -> None:
        """Waits a period. Its lateness shows how busy the machine is, whatever the server does."""
        began_s = time.monotonic()
        if not self.over.wait(PERIOD_S):
            self.seen["late_s"] = max(self.seen["late_s"], time.monotonic() - began_s - PERIOD_S)

    def _wake(self, processor: int) -> None:
        """On one processor, or its lateness says nothing of what the others are kept from by the machine's host."""
        os.sched_setaffinity(0, {processor})  # of this thread
        while not self.over.is_set():
            self._pause()

    def _read_memory(self) -> None:
        while not self.over.is_set():
            own, others = memory_of(self.session)
            self.seen["memory"].append(own)
            self.seen["others"].append(others)
            self._pause()

    def _stream(self) -> None:
        if not self.body:
            self.begun.set()
            return
        while not self.over.is_set():
            self.seen["streams"].append(self._stream_once())
            self.over.wait(REST_S)

    def _stream_once(self) -> dict[str, Any]:
        connection = self._connect()
        body = json.dumps(self.body | {"stream": True, "return_token_ids": True})
        headers = self.headers | {"Content-Type": "application/json"}
        began_s = time.monotonic()
        connection.request("POST", "/v1/completions", body, headers)
        reply = connection.getresponse()
        assert reply.status == 200, f"an honest stream was answered {reply.status}: {reply.read(500)!r}"
        tokens: list[int] = []
        came_s: list[float] = []
        ended = False
        while line := reply.readline():
            data = line.removeprefix(b"data: ").strip()
            if not line.startswith(b"data: "):
                continue
            if data == b"[DONE]":
                ended = True
                break
            event = json.loads(data)
            assert "error" not in event, f"an honest stream ended with {event['error']}"
            ids = event["choices"][0]["token_ids"]
            tokens += ids
            came_s += [time.monotonic() - began_s] * len(ids)
            self.begun.set()
        connection.close()
        return {"tokens": tokens, "came_s": came_s, "ended": ended}


def memory_of(session: int) -> tuple[dict[str, int], int]:
    """Resident KiB of each proxy by its process, and of what else the session has but its instances."""
    own: dict[str, int] = {}
    others = 0
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        with contextlib.suppress(OSError, StopIteration, IndexError):
            if int((entry / "stat").read_text().rpartition(")")[2].split()[3]) != session:
                continue
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            lines = (entry / "status").read_text().splitlines()
            kib = next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))
            if any(f"-m {name}" in command for name in PROXIES):
                own[entry.name] = kib
            elif INSTANCES not in command:
                others += kib
    return own, others


if __name__ == "__main__":
    sys.stdout.write(json.dumps(Watcher(json.loads(sys.argv[1])).run()) + "\n")
