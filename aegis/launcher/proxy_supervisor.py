"""The processes of the proxies beside the first: started, watched, started again when they die.

Each start has a number of its own, which its requests bear: what was a lost one's is never taken for its successor's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import msgspec

from aegis.core.clock import NS_PER_S
from aegis.core.ids import ProxyId
from aegis.launcher.hang_detector import LOOK_NS, HangDetector
from aegis.launcher.live_market import LiveMarket
from aegis.launcher.remote_proxy import RemoteProxy
from aegis.metadata.store import Store
from aegis.process.child import follow_launcher
from aegis.process.restart_backoff import RestartBackoff
from aegis.process.tasks import watched
from aegis.transport.links import Hub
from aegis.transport.node_messages import (
    TELL_S,
    Alive,
    FromProxy,
    Joined,
    LookUp,
    NodeCall,
    NodeCallCancelled,
    PrefixFound,
    ProxyReport,
    ResponseCancelled,
    Scraped,
    Serves,
)
from proxy.live.serving import running
from proxy.live.settings import ProxySettings

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Place:
    """One proxy; `process` and `number` are those of its present start."""

    name: str
    number: ProxyId
    process: asyncio.subprocess.Process | None = None
    end: RemoteProxy | None = None  # since it joined
    serves: bool = False
    restarts: RestartBackoff = field(default_factory=RestartBackoff)
    keeper: asyncio.Task[None] | None = None

    @property
    def identity(self) -> str:
        return f"{self.name}/{self.number}"


class ProxySupervisor:
    """All but the node's own."""

    def __init__(
        self,
        names: list[str],
        template: ProxySettings,
        market: LiveMarket,
        store: Store | None,
        link: Hub[FromProxy],
    ) -> None:
        """`template` is completed for each start."""
        self._template = template
        self._market = market
        self._store = store
        self._link = link
        self._places = {name: _Place(name, ProxyId(0)) for name in names}
        self._numbers = count(1)
        self._hang_detector = HangDetector()
        self._closing = asyncio.Event()
        self._starting = asyncio.Lock()
        ends = market.node.proxies
        ends.missing, ends.dead, ends.on_silent = self._missing, self._dead, self._kill

    def start(self) -> None:
        for place in self._places.values():
            place.keeper = watched(self._keep(place))

    async def listen(self) -> None:
        """Runs until it is cancelled."""
        while True:
            identity, messages = await self._link.receive()
            place = self._places.get(identity.partition("/")[0])
            if place and place.process and place.identity == identity:
                for message in messages:
                    self._on_message(place, message)
                if place.end:
                    self._hang_detector.saw_message(place.number, time.monotonic_ns())

    async def share_reports(self) -> None:
        """Runs until it is cancelled."""
        node, proxy = self._market.node, self._market.proxy
        while True:
            await asyncio.sleep(TELL_S)
            node.on_proxy_message(proxy.number, proxy.report())
            for place in self._places.values():
                if place.end:
                    place.end.refresh()

    async def watch(self) -> None:
        """Ends those that hang. Runs until it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_NS / NS_PER_S)
            used_ns = {p.number: _used_ns(p.process.pid) for p in self._places.values() if p.process}
            for proxy in self._hang_detector.check(used_ns, time.monotonic_ns()):
                self._kill(proxy)

    async def close(self, timeout_s: float) -> None:
        """Waits for the end of the proxies, which have been told to drain, and kills those that do not end."""
        self._closing.set()
        for place in self._places.values():
            if place.process and not place.end:  # it was not told
                _end(place.process)
        keepers = [place.keeper for place in self._places.values() if place.keeper]
        _, late = await asyncio.wait(keepers, timeout=timeout_s) if keepers else ((), ())
        for place in self._places.values():
            if place.keeper in late and place.process:
                _end(place.process)
        if late:
            await asyncio.wait(late)

    def _on_message(self, place: _Place, message: FromProxy) -> None:
        node = self._market.node
        match message:
            case Joined(address):
                place.end = RemoteProxy(address, place.identity, self._link, self._market.queries)
                place.end.refresh()
                node.join(place.number, place.end)
            case Serves():
                place.serves = True
            case Alive():
                pass
            case LookUp(call_id, instance, job):
                if place.end:
                    place.end.deliver(PrefixFound(call_id, node.prefix_of(instance, job)))
            case NodeCall() | NodeCallCancelled() | Scraped() | ResponseCancelled():
                if place.end:
                    place.end.on_message(message)
            case _:
                if place.end and isinstance(message, ProxyReport):
                    place.end.on_message(message)
                node.on_proxy_message(place.number, message)

    def _missing(self) -> list[str]:
        return [place.name for place in self._places.values() if not place.serves]

    def _dead(self) -> list[str]:
        return [place.name for place in self._places.values() if place.restarts.given_up]

    def _kill(self, number: ProxyId) -> None:
        for place in self._places.values():
            if place.number == number and place.process:
                _logger.warning("%s (pid %d) does not answer", place.name, place.process.pid)
                _end(place.process)

    @property
    def _ending(self) -> bool:
        """A proxy that has nothing left to do ends as soon as it is told to drain."""
        return self._closing.is_set() or self._market.node.draining

    async def _keep(self, place: _Place) -> None:
        """Starts the proxy again and again, until it is given up or all are to end."""
        while not self._ending:
            started_s = time.monotonic()
            try:
                async with self._starting:  # a start holds up the loop, which is to hear of a signal in between
                    if self._ending:
                        return
                    process = await self._spawn(place)
                if self._ending:
                    _end(process)
            except OSError as error:
                _logger.warning("%s cannot be started: %s", place.name, error.strerror)
                place.restarts.failed()
            else:
                code = await process.wait()
                if not self._ending:
                    _logger.warning("%s (pid %d) ended with code %d", place.name, process.pid, code)
                self._lost(place, after_s=time.monotonic() - started_s)
            if place.restarts.given_up:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(place.restarts.pause_s):
                    await self._closing.wait()

    def _lost(self, place: _Place, *, after_s: float) -> None:
        place.restarts.ended(served=place.serves, after_s=after_s)
        place.serves, place.process = False, None
        if self._store:
            self._store.declare_dead(place.name, place.number)
        self._hang_detector.forget(place.number)
        if place.end:
            place.end.lost()
            place.end = None
            self._market.node.leave(place.number)

    async def _spawn(self, place: _Place) -> asyncio.subprocess.Process:
        place.number = ProxyId(next(self._numbers))
        settings = msgspec.structs.replace(
            self._template,
            name=place.name,
            number=place.number,
            address=self._market.wires.address(f"proxy-{place.number}"),
        )
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "proxy.live.process",
            place.name,  # for readers of the process list
            stdin=asyncio.subprocess.PIPE,
            preexec_fn=follow_launcher,
        )
        place.process = process
        self._hang_detector.started(place.number, time.monotonic_ns())
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(settings))
        with contextlib.suppress(ConnectionError):
            await process.stdin.drain()
        process.stdin.close()
        return process


def _end(process: asyncio.subprocess.Process) -> None:
    """Does nothing if it has ended, which its keeper may not know yet."""
    with contextlib.suppress(ProcessLookupError):
        process.kill()


def _used_ns(pid: int) -> int:
    """Processor time of the process's main thread (proc(5), schedstat); 0 of one that is gone."""
    try:
        return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0])
    except OSError:
        return 0


@asynccontextmanager
async def open_proxies(
    count: int, template: ProxySettings, market: LiveMarket, store: Store | None, *, drain_s: float
) -> AsyncIterator[ProxySupervisor]:
    """`count` of them besides the first, which are gone afterwards. They are not started yet."""
    link: Hub[FromProxy] = Hub(template.node_address, FromProxy)
    proxies = ProxySupervisor([f"proxy-{seat}" for seat in range(1, 1 + count)], template, market, store, link)
    try:
        async with running(*((proxies.listen(), proxies.share_reports(), proxies.watch()) if count else ())):
            try:
                yield proxies
            finally:
                if not market.node.draining:  # else they have their time, and a second word would end it
                    market.node.drain(0)
                await proxies.close(drain_s)
    finally:
        link.close()
