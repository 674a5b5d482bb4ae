"""Four processes inflate and deflate one pool, and one that is killed leaves nothing behind.

`AEGIS_STRESS_SECONDS=60` is the long form.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import IO

import msgspec
import pytest

from aegis.core.ids import InstanceId
from aegis.core.messages import GaveBack, GrantPages, NeedPages, TakeBack
from aegis.device.cpu.pool import PAGE_BYTES, CpuPool
from aegis.device.shared_events import SharedWords
from memory.page_arbiter import ArbiterEffect, PageArbiter, WipeLost
from tests.live.memory.page_holder import FromHolder, Report

SECONDS = float(os.environ.get("AEGIS_STRESS_SECONDS", "3"))
PAGES = 64
PATIENCE_NS = 60_000_000_000
AHEAD_PAGES = 4


class Owner:
    """The owner of the accounts, with the processes that hold pages."""

    def __init__(self, pages: int) -> None:
        self.pool = CpuPool(pages * PAGE_BYTES, ahead_pages=AHEAD_PAGES)
        self.arbiter = PageArbiter(pages, idle_ns=PATIENCE_NS, patience_ns=PATIENCE_NS, quantum=1)
        self.holders: dict[InstanceId, subprocess.Popen[bytes]] = {}
        self.reports: dict[InstanceId, Report] = {}
        self.handed = 0  # pages taken from one and given to another
        self._words = SharedWords.create(256)
        self._started = 0
        self._heard: SimpleQueue[tuple[InstanceId, bytes]] = SimpleQueue()

    def start(self) -> InstanceId:
        self._started += 1
        name = InstanceId(f"holder-{self._started}")
        arguments = [self.pool.address, self._words.path, str(self._started), str(self._started)]
        self.holders[name] = subprocess.Popen(
            [sys.executable, "-m", "tests.live.memory.page_holder", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.arbiter.join(name)
        Thread(target=self._listen, args=(name, self.holders[name]), daemon=True).start()
        return name

    def kill(self, name: InstanceId) -> None:
        self.holders[name].send_signal(signal.SIGKILL)

    def attend(self) -> None:
        """To one thing that is heard."""
        name, line = self._heard.get()
        if not line:
            code = self.holders.pop(name).wait()
            assert code == (0 if name in self.reports else -signal.SIGKILL), f"{name} failed, see above"
            self._perform(self.arbiter.lost(name))
        else:
            match msgspec.json.decode(line, type=FromHolder):
                case NeedPages() as request:
                    self._perform(self.arbiter.ask(name, request))
                case GaveBack() as answer:
                    self.handed += sum(run.pages for run in answer.runs)
                    self._perform(self.arbiter.gave_back(name, answer))
                case Report() as report:
                    self.reports[name] = report
        self.arbiter.check()

    def stop(self) -> None:
        """Ends all processes, each of which verifies what it holds."""
        for name in self.holders:
            self._stdin(name).close()
        while self.holders:
            self.attend()

    def close(self) -> None:
        for process in self.holders.values():
            process.kill()
            process.wait()
        self.pool.close()
        self._words.close()

    def _perform(self, effects: Sequence[ArbiterEffect]) -> None:
        for effect in effects:
            if isinstance(effect, WipeLost):
                self.pool.wipe(effect.runs)
                self._perform(self.arbiter.wiped(effect.key))
            elif isinstance(effect, tuple):
                self._tell(*effect)

    def _tell(self, name: InstanceId, message: GrantPages | TakeBack) -> None:
        stdin = self._stdin(name)
        if stdin.closed:
            return  # it is ending
        with suppress(BrokenPipeError):  # its end will be heard
            stdin.write(msgspec.json.encode(message) + b"\n")
            stdin.flush()

    def _stdin(self, name: InstanceId) -> IO[bytes]:
        stdin = self.holders[name].stdin
        assert stdin is not None
        return stdin

    def _listen(self, name: InstanceId, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._heard.put((name, line))
        self._heard.put((name, b""))


@pytest.fixture
def owner() -> Iterator[Owner]:
    owner = Owner(PAGES)
    yield owner
    owner.close()


@pytest.mark.timeout(SECONDS + 120)
def test_four_processes_share_a_pool(owner: Owner) -> None:
    """Halfway one of them is killed, and another one started."""
    names = [owner.start() for _ in range(4)]
    end_s = time.monotonic() + SECONDS
    while owner.handed < PAGES or time.monotonic() < end_s - SECONDS / 2:
        owner.attend()
    owner.kill(names[1])
    last = owner.start()
    while not owner.arbiter.held(last) or time.monotonic() < end_s:
        owner.attend()
    owner.stop()
    assert sorted(owner.reports) == sorted({*names, last} - {names[1]})
    for report in owner.reports.values():
        assert report.arrived == report.left > 0
        assert report.verified >= report.left
    assert owner.arbiter.free == PAGES


def test_a_killed_process_leaves_neither_its_bytes_nor_its_memory(owner: Owner) -> None:
    first = owner.start()
    while owner.arbiter.held(first) < PAGES - 16:
        owner.attend()
    while owner.pool.taken_bytes // PAGE_BYTES < PAGES - 16:  # what was granted last is not written yet
        owner.attend()
    owner.kill(first)
    while first in owner.holders:
        owner.attend()
    assert owner.arbiter.free == PAGES
    assert owner.pool.taken_bytes // PAGE_BYTES <= 2 * AHEAD_PAGES  # before the lowest pages, and those
    second = owner.start()  # fails where it does not find zeros
    while owner.arbiter.held(second) < PAGES - 16:
        owner.attend()
    owner.stop()
    assert owner.reports[second].arrived >= PAGES - 16
