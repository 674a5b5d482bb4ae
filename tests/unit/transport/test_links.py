"""An instance's wires: each message takes the one of whom it concerns, and a lost proxy's is cut."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from aegis.core.clock import NS_PER_S
from aegis.core.ids import ModelId, ProxyId, nth_request
from aegis.core.messages import (
    Cancel,
    DropModel,
    DropProxy,
    FromInstance,
    Greeting,
    NeedSlabs,
    Ping,
    Ready,
    ToInstance,
    Tokens,
)
from aegis.core.request import Token
from aegis.core.role import Role
from aegis.process.wakeup import Wakeup
from aegis.transport.curve_sockets import new_keys
from aegis.transport.links import Hub, InstanceLink, NodeMessage

FIRST, SECOND = ProxyId(0), ProxyId(1)
WHO = "decode-0/3"
HELLO = Greeting(Role.DECODE)

Hubs = dict[ProxyId | None, Hub[Any]]


def connected(tmp_path: Path, work: Callable[[InstanceLink, Hubs], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        node: Hub[NodeMessage] = Hub(f"ipc://{tmp_path}/node", NodeMessage)
        hubs: Hubs = {None: node}
        for proxy in (FIRST, SECOND):
            hubs[proxy] = Hub(f"ipc://{tmp_path}/proxy-{proxy}", FromInstance)
        link = InstanceLink(node.address, WHO)
        try:
            async with asyncio.timeout(30):
                for proxy in (FIRST, SECOND):
                    link.meet(proxy, hubs[proxy].address, HELLO)
                    assert await hubs[proxy].receive() == (WHO, [HELLO])
                await work(link, hubs)
        finally:
            link.close()
            for hub in hubs.values():
                hub.close()

    asyncio.run(main())


def received(link: InstanceLink, count: int) -> list[ToInstance]:
    messages: list[ToInstance] = []
    while len(messages) < count:
        messages += link.receive(NS_PER_S)
    return messages


def test_everybody_gets_what_is_theirs(tmp_path: Path) -> None:
    async def work(link: InstanceLink, hubs: Hubs) -> None:
        mine, yours = (Tokens(nth_request(proxy, 1), 1, 0, (Token(5),)) for proxy in (FIRST, SECOND))
        link.send([mine, NeedSlabs(1), yours])
        assert await hubs[FIRST].receive() == (WHO, [mine])
        assert await hubs[SECOND].receive() == (WHO, [yours])
        assert await hubs[None].receive() == (WHO, [NeedSlabs(1)])

    connected(tmp_path, work)


def test_all_are_heard(tmp_path: Path) -> None:
    async def work(link: InstanceLink, hubs: Hubs) -> None:
        told = {hub: Cancel(nth_request(ProxyId(at), 1), 1) for at, hub in enumerate(hubs)}
        link.send([NeedSlabs(1)])
        await hubs[None].receive()  # and the node knows where to send
        for hub, message in told.items():
            hubs[hub].send(WHO, [message])
        assert set(received(link, 3)) == set(told.values())

    connected(tmp_path, work)


def test_a_lost_proxy_is_neither_heard_nor_told(tmp_path: Path) -> None:
    async def work(link: InstanceLink, hubs: Hubs) -> None:
        link.send([NeedSlabs(1)])
        await hubs[None].receive()
        hubs[SECOND].send(WHO, [Cancel(nth_request(SECOND, 1), 1)])
        assert received(link, 1)  # its wire works
        hubs[SECOND].send(WHO, [Cancel(nth_request(SECOND, 2), 1)])
        hubs[FIRST].send(WHO, [DropModel(ModelId("m"))])
        hubs[None].send(WHO, [DropProxy(SECOND)])
        assert received(link, 2) == [DropProxy(SECOND), DropModel(ModelId("m"))]
        link.send([Tokens(nth_request(SECOND, 1), 1, 0, (Token(5),)), NeedSlabs(2)])
        assert await hubs[None].receive() == (WHO, [NeedSlabs(2)])

    connected(tmp_path, work)


class _Counted(selectors.DefaultSelector):
    looks = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.looks += 1
        return super().select(timeout)


@pytest.mark.parametrize("address", ["ipc", "tcp"])
def test_another_thread_ends_the_wait_for_messages_and_none_is_lost(tmp_path: Path, address: str) -> None:
    async def main() -> None:
        keys = new_keys()
        where = f"ipc://{tmp_path}/node" if address == "ipc" else "tcp://127.0.0.1:*"
        hub: Hub[NodeMessage] = Hub(where, NodeMessage, keys)
        link, wakeup = InstanceLink(hub.address, WHO, keys.public), Wakeup()
        link.heed(wakeup.fileno())
        link.send([Ready(1)])
        assert await hub.receive() == (WHO, [Ready(1)])
        waiting = asyncio.create_task(asyncio.to_thread(link.receive, 60 * NS_PER_S))
        wakeup.ring()
        wakeup.ring()
        assert await asyncio.wait_for(waiting, 20) == []
        hub.send(WHO, [Ping()])
        assert received(link, 1) == [Ping()]
        wakeup.clear()
        wakeup.clear()
        assert link.receive(0) == []
        link.close()
        hub.close()
        wakeup.close()

    asyncio.run(main())


def test_what_nobody_listens_to_leaves_the_loop_asleep(tmp_path: Path) -> None:
    selector = _Counted()

    async def idle() -> None:
        hub: Hub[NodeMessage] = Hub(f"ipc://{tmp_path}/node", NodeMessage)
        link = InstanceLink(hub.address, WHO)
        link.send([NeedSlabs(1)])
        await asyncio.sleep(0.2)
        assert selector.looks < 100
        assert await hub.receive() == (WHO, [NeedSlabs(1)])
        link.close()
        hub.close()

    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
        runner.run(idle())


def test_who_has_not_the_key_is_not_heard(tmp_path: Path) -> None:
    async def main() -> None:
        keys = new_keys()
        hub: Hub[NodeMessage] = Hub("tcp://127.0.0.1:*", NodeMessage, keys)
        assert not hub.address.endswith("*")
        stranger = InstanceLink(hub.address, "stranger/1", new_keys().public)
        keyless = zmq.Context.instance().socket(zmq.DEALER)
        keyless.connect(hub.address)
        link = InstanceLink(hub.address, WHO, keys.public)
        keyless.send(msgspec.msgpack.encode([Ready(1)]))
        for one in (stranger, link):
            one.send([Ready(1)])
        assert await hub.receive() == (WHO, [Ready(1)])
        hub.send(WHO, [Ping()])
        assert link.receive(5_000_000_000) == [Ping()]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(hub.receive(), 0.3)
        stranger.send([Ready(1)])  # returns, though nobody takes it
        hub.close()
        keyless.close(0)
        for one in (stranger, link):
            one.close()

    asyncio.run(main())
