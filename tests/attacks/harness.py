"""What every attack is measured by: the server's memory, its health, an honest stream beside, and that it can be ended.

with under_attack(server) as report:
    …
print(report)
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import httpx

from tests.attacks import watcher
from tests.live.server import STOP_S, Server, launched

GROWTH_KIB = 64 << 10
HEALTH_S = 0.25
TTFT_S, TBT_S = 10.0, 0.1  # the server's, where nothing else is told
END_S = 5.0
HONEST: dict[str, Any] = {"model": "llama", "prompt": [5, 6, 7, 8], "max_tokens": 50} | {
    "ignore_eos": True,
    "temperature": 0,
}
MEMORY = "64MiB"
"""Of the device: room for some of the eight models."""

_BEGIN_S = 60.0
_END_S = 180.0
T = TypeVar("T")


@dataclass(slots=True)
class Report:
    """The observations during an attack. `late_s` is the worst lateness of the watcher itself, on any processor."""

    name: str
    took_s: float = 0.0
    memory_kib: int = 0
    peak_kib: int = 0
    after_kib: int = 0
    others_peak_kib: int = 0
    """Of the server's processes that are neither proxies nor instances."""
    fresh_s: float = 0.0
    kept_s: float = 0.0
    asked: int = 0
    late_s: float = 0.0
    streams: int = 0
    ttft_s: float = 0.0
    gap_s: float = 0.0
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        parts = (
            f"{self.name}: {self.took_s:.1f} s",
            f"memory {self.memory_kib >> 10} MiB",
            f"at most {self._grown(self.peak_kib)}, after {self._grown(self.after_kib)}",
            f"health {_ms(self.fresh_s)} and {_ms(self.kept_s)} (of {self.asked}), woken {_ms(self.late_s)} late",
            f"{self.streams} streams, first token {self.ttft_s:.2f} s, gap {_ms(self.gap_s)}",
            f"others {self.others_peak_kib >> 10} MiB",
        )
        return "; ".join(parts)

    def _grown(self, kib: int) -> str:
        return f"{(kib - self.memory_kib) / 1024:+.0f}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms"


REPORTS: list[Report] = []
_recorded: dict[int, list[int]] = {}


@contextmanager
def attacked(
    directory: Path, cache: Path, *options: str, environment: dict[str, str] | None = None
) -> Iterator[Server]:
    """A server of one mixed instance, with whatever options besides, ready to be attacked."""
    common = ["--dtype", "float32", "--device-memory", MEMORY, "--mixed", "1"]
    with launched(directory, cache, *common, *options, environment=environment) as server:
        server.wait_for_ready()
        yield server


@contextmanager
def under_attack(
    server: Server,
    name: str = "",
    *,
    key: str = "",
    honest: dict[str, Any] | None = None,
    growth_kib: int = GROWTH_KIB,
    health_s: float = HEALTH_S,
) -> Iterator[Report]:
    """Fails at the end of the block where its proxies grew by more than `growth_kib`, at any time or for good; where
    its health was asked and not told in time; where an honest stream beside got other tokens than alone, or late ones.
    """
    body = HONEST if honest is None else honest
    expected = recorded(server, body, key)
    config = {"url": server.url, "session": server.process.pid, "body": body, "key": key}
    report, began_s = Report(name), time.monotonic()
    command = [sys.executable, watcher.__file__, json.dumps(config)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as watching:
        try:
            assert watching.stdout and watching.stdout.readline() == "begun\n", "the watcher did not begin"
            yield report
            told, _ = watching.communicate(timeout=_END_S)
        finally:
            watching.kill()
    report.took_s = time.monotonic() - began_s
    _judge(report, json.loads(told), expected, growth_kib, health_s)
    REPORTS.append(report)
    assert not report.faults, f"{report.faults}\n{report}"


def recorded(server: Server, body: dict[str, Any] = HONEST, key: str = "") -> list[int]:
    """The tokens that `body` is answered with while nothing else runs; also brings its model in."""
    if not body:
        return []
    known = hash((server.process.pid, json.dumps(body, sort_keys=True)))
    if known not in _recorded:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        asked = body | {"return_token_ids": True}
        reply = httpx.post(
            server.url + "/v1/completions",
            json=asked,
            headers=headers,
            timeout=watcher.WAIT_S,
            trust_env=False,
            verify=False,
        )
        assert reply.status_code == httpx.codes.OK, reply.text
        _recorded[known] = reply.json()["choices"][0]["token_ids"]
    return _recorded[known]


def _judge(report: Report, seen: dict[str, Any], expected: Sequence[int], growth_kib: int, health_s: float) -> None:
    faults = report.faults
    faults += seen["errors"]
    memory: list[dict[str, int]] = seen["memory"]
    proxies = memory[0].keys()
    report.memory_kib = sum(memory[0].values())
    report.peak_kib = max(sum(each.values()) for each in memory)
    report.after_kib = sum(memory[-1].values())
    report.others_peak_kib = max(seen["others"], default=0)
    for pid in proxies:
        grown_kib = max(each.get(pid, 0) for each in memory) - memory[0][pid]
        if grown_kib > growth_kib:
            faults.append(f"a proxy grew by {grown_kib >> 10} MiB")
        if pid not in memory[-1]:
            faults.append("a proxy ended")
    report.fresh_s, report.kept_s = max(seen["fresh_s"], default=0.0), max(seen["kept_s"], default=0.0)
    report.asked, report.late_s = len(seen["fresh_s"]) + len(seen["kept_s"]), seen["late_s"]
    # what the watcher itself waited for a processor is not the server's
    late_s = min(report.late_s, health_s)
    for what, worst_s in (("fresh", report.fresh_s), ("kept", report.kept_s)):
        if worst_s > health_s + late_s:
            faults.append(f"/health took {1e3 * worst_s:.0f} ms on a {what} connection")
    for stream in seen["streams"]:
        _judge_stream(report, stream, expected)


def _judge_stream(report: Report, stream: dict[str, Any], expected: Sequence[int]) -> None:
    report.streams += 1
    came_s = stream["came_s"]
    if not stream["ended"] or stream["tokens"] != list(expected):
        report.faults.append(f"an honest stream got {len(came_s)} tokens, not those it gets alone")
    if not came_s:
        return
    report.ttft_s = max(report.ttft_s, came_s[0])
    report.gap_s = max([report.gap_s, *(b - a for a, b in pairwise(came_s))])
    late = [(i, at_s) for i, at_s in enumerate(came_s) if at_s > TTFT_S + i * TBT_S]
    if late:
        report.faults.append(f"{len(late)} tokens of an honest stream were late, the first token {late[0]}")


def ends_soon(server: Server, within_s: float = END_S, number: signal.Signals = signal.SIGTERM) -> float:
    """The signal ends it, and well; how long that took."""
    began_s = time.monotonic()
    server.process.send_signal(number)
    try:
        code = server.process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"it has not ended within {STOP_S:.0f} s of SIGTERM") from None
    took_s = time.monotonic() - began_s
    assert code == 0, f"it ended with code {code}"
    assert took_s <= within_s, f"it took {took_s:.1f} s to end"
    return took_s


def at_once(attack: Callable[[int], T], count: int) -> list[T]:
    """The results of `count` attackers that all begin at once."""
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(attack, range(count)))
