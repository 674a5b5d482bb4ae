"""The process of a further proxy: clients on the shared port, instances and the node over wires (`link`).

Started as `python -m proxy.live.process` with its settings as JSON on standard input.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine
from contextlib import AsyncExitStack

import msgspec
import uvloop

from aegis.core.errors import UserError
from aegis.core.messages import FromInstance
from aegis.metadata.store import join_store
from aegis.process import garbage_collection
from aegis.process.clock import MonotonicClock
from aegis.process.open_files import allow_many_open_files
from aegis.telemetry import logs
from aegis.telemetry.history import History
from aegis.telemetry.request_stages import RequestStages
from aegis.telemetry.tracing import traced
from aegis.transport.links import Hub, Spoke
from aegis.transport.node_messages import (
    TELL_S,
    Alive,
    CancelResponse,
    Card,
    CardRemoved,
    Drain,
    Joined,
    NodeAnswer,
    PrefixFound,
    ProxyReport,
    Registering,
    ResponseCancelled,
    Scraped,
    ScrapeWanted,
    Serves,
    ToProxy,
)
from proxy.live.listening import share
from proxy.live.proxy import Proxy
from proxy.live.remote_node import RemoteNode
from proxy.live.serving import acceptors, drained, http_server, running
from proxy.live.settings import ProxySettings


class _Process:
    """A proxy, its node and what is to be remembered of its requests until the node has it."""

    def __init__(self, settings: ProxySettings, stages: RequestStages | None) -> None:
        self.stop = asyncio.Event()  # a second `Drain` ends what runs
        self.draining = asyncio.Event()
        self.within_s = 0.0
        self._link: Spoke[ToProxy] = Spoke(settings.node_address, settings.identity, ToProxy)
        self._node = RemoteNode(self._link, reuses=settings.reuses)
        self._history = History(
            spans=0, records=settings.records, decisions=settings.decisions, token_times=settings.token_times
        )
        self._hub: Hub[FromInstance] = Hub(settings.address, FromInstance, settings.keys)
        self.proxy = Proxy(
            settings.number,
            settings.router(),
            self._node,
            self._hub,
            MonotonicClock(),
            self._history,
            stages=stages,
            refuses_late=settings.refuses_late,
        )
        self._sent_records = self._sent_decisions = 0
        self._last_report: ProxyReport | None = None
        self._answering: set[asyncio.Task[None]] = set()

    async def join(self) -> None:
        """Returns when it knows all that the node does."""
        self._node.notify(Joined(self.proxy.address))
        await self._node.queries.healthy()  # whose answer comes after all there is
        await self._node.opened()

    def serves(self) -> None:
        self._node.notify(Serves())

    async def listen_to_node(self) -> None:
        """Runs until it is cancelled."""
        while True:
            for message in await self._link.receive():
                self._on_message(message)

    async def send_reports(self) -> None:
        """Runs until it is cancelled."""
        while True:
            await asyncio.sleep(TELL_S)
            self.send_report()

    def send_report(self) -> None:
        """Sends the news since the last call, or that there are none."""
        records, decisions = self._history.records, self._history.decisions
        told = msgspec.structs.replace(
            self.proxy.report(),
            records=tuple(records.since(self._sent_records)),
            decisions=tuple(decisions.since(self._sent_decisions)),
        )
        self._sent_records, self._sent_decisions = records.next, decisions.next
        self._node.notify(Alive() if told == self._last_report else told)
        self._last_report = told

    def _on_message(self, message: ToProxy) -> None:
        match message:
            case Card() | CardRemoved() | Registering():
                self._node.on_message(message)
            case PrefixFound():
                self._node.on_message(message)
                self.proxy.flush()
            case NodeAnswer():
                self._node.queries.answered(message)
            case ScrapeWanted(call_id):
                self._begin(self._scrape(call_id))
            case CancelResponse(call_id, key):
                self._begin(self._cancel_response(call_id, key))
            case Drain(within_s):
                self.proxy.deliver(message)
                if self.draining.is_set():
                    self.stop.set()
                self.within_s = within_s
                self.draining.set()
            case _:
                self.proxy.deliver(message)

    def _begin(self, answering: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(answering)
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _scrape(self, call_id: int) -> None:
        self._node.notify(Scraped(call_id, await self.proxy.scrape()))

    async def _cancel_response(self, call_id: int, key: str) -> None:
        self._node.notify(ResponseCancelled(call_id, await self.proxy.cancel_response(key)))


async def _serve(settings: ProxySettings) -> None:
    async with AsyncExitStack() as stack:
        process = _Process(settings, stack.enter_context(traced(settings.otlp, settings.name)))
        store = None
        if settings.store:
            store = await stack.enter_async_context(join_store(settings.store, settings.name, settings.number))
            store.report_to(process.proxy.registry)
        await stack.enter_async_context(
            running(process.listen_to_node(), process.proxy.listen(), process.send_reports())
        )
        await process.join()
        listener = share(settings.host, settings.port)
        http = msgspec.structs.replace(settings.http, proxy=settings.name)
        server = http_server(process.proxy, listener, store, http)
        serving = asyncio.create_task(server.serve(acceptors(listener)))
        process.serves()
        garbage_collection.collect_seldom()
        collecting = garbage_collection.collect_when_idle(lambda: process.proxy.busy)
        await stack.enter_async_context(running(collecting))
        await process.draining.wait()
        await drained(process.proxy, process.stop, within_s=process.within_s)
        server.should_exit = True
        await serving
        process.send_report()


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides when it ends
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=ProxySettings)
    logs.guard_streams(settings.logs)
    logs.setup(settings.logs)
    allow_many_open_files()
    try:
        uvloop.run(_serve(settings))
    except UserError as error:
        sys.stderr.write(f"aegis: {settings.name}: {error.message}\n")
        return 2
    return 0


if __name__ == "__main__":
    code = main()
    logs.finish()
    os._exit(code)  # a thread may still be busy with what a client sent
