"""A link between machines that breaks is noticed by the instance, which has received all that came before."""

from __future__ import annotations

import asyncio
import ctypes
import socket
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest
import zmq

from aegis.core.clock import NS_PER_MS, NS_PER_S
from aegis.core.ids import InstanceId, ProxyId
from aegis.core.messages import DropProxy, FromInstance, Greeting, NeedSlabs, Ping, Ready, Shutdown, ToInstance
from aegis.core.role import Role
from aegis.instance.process import exit_code
from aegis.transport import curve_sockets
from aegis.transport.curve_sockets import CurveWire, CurveWires, new_keys
from aegis.transport.failures import LinkBroken
from aegis.transport.links import Hub, InstanceLink, NodeMessage

WHO, PROXY = "mixed-0/3", ProxyId(1)
HELLO = Greeting(Role.MIXED)
_RESET = struct.pack("ii", 1, 0)
_SO_ATTACH_FILTER = 26
_DROPS_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)  # "return 0", as a packet filter (bpf(4))


class Relay:
    """Passes on what is between a hub and those that connect to its own address."""

    def __init__(self, target: str) -> None:
        self._target = target.rpartition(":")[2]
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._passes = asyncio.Event()
        self._passes.set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.address = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def reset(self) -> None:
        """As a firewall does that forgets connections."""
        for writer in self._writers:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()
        self._writers.clear()

    def cut(self) -> None:
        """As a cable: nobody hears of it. The system drops whatever comes, and acknowledges nothing."""
        program = ctypes.create_string_buffer(_DROPS_ALL)
        for writer in self._writers:
            attached = struct.pack("HP", 1, ctypes.addressof(program))
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, attached)

    def stand_still(self) -> None:
        """As a process that is stopped: its system still acknowledges what comes."""
        self._passes.clear()

    def go_on(self) -> None:
        self._passes.set()

    async def close(self) -> None:
        self._server.close()
        self.reset()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._target)
        self._writers += [writer, there_writer]
        for pair in ((reader, there_writer), (there_reader, writer)):
            task = asyncio.create_task(self._pass_on(*pair))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                await self._passes.wait()
                writer.write(data)
                await writer.drain()
            writer.close()
        except ConnectionError:
            writer.close()


class Stand:
    """A node and a proxy, with a relay before each, and the link of an instance to both."""

    def __init__(self) -> None:
        keys = new_keys()
        self.node: Hub[NodeMessage] = Hub("tcp://127.0.0.1:*", NodeMessage, keys)
        self.proxy: Hub[FromInstance] = Hub("tcp://127.0.0.1:*", FromInstance, keys)
        self.to_node, self.to_proxy = Relay(self.node.address), Relay(self.proxy.address)
        self._market_key = keys.public

    async def start(self) -> None:
        for relay in (self.to_node, self.to_proxy):
            await relay.start()
        self.link = InstanceLink(self.to_node.address, WHO, self._market_key)
        self.link.send([Ready(1)])
        assert await self.node.receive() == (WHO, [Ready(1)])
        self.link.meet(PROXY, self.to_proxy.address, HELLO)
        assert await self.proxy.receive() == (WHO, [HELLO])

    @property
    def wires(self) -> list[CurveWire]:
        """The node's and the proxy's."""
        assert isinstance(self.link._wires, CurveWires)
        return self.link._wires._wires

    async def received(self, seconds: float = 30) -> list[ToInstance]:
        return await asyncio.to_thread(self.link.receive, round(seconds * NS_PER_S))

    async def until(self, condition: Callable[[], object]) -> None:
        """The instance listens until then, and hears nothing."""
        while not condition():
            assert await self.received(0.01) == []

    async def arrived(self) -> None:
        """Something of the node's has, and is not received yet."""
        assert await asyncio.to_thread(self.wires[0].socket.poll, 30_000)

    async def close(self) -> None:
        self.link.close()
        for relay in (self.to_node, self.to_proxy):
            await relay.close()
        self.node.close()
        self.proxy.close()


@asynccontextmanager
async def standing() -> AsyncIterator[Stand]:
    stand = Stand()
    try:
        async with asyncio.timeout(60):
            await stand.start()
            yield stand
    finally:
        await stand.close()


def test_a_link_to_the_node_that_is_reset_is_broken() -> None:
    async def main() -> None:
        async with standing() as stand:
            stand.to_node.reset()
            with pytest.raises(LinkBroken) as broken:
                await stand.received()
            assert str(broken.value) == f"the link to the launcher at {stand.to_node.address} broke"
            stand.link.send([NeedSlabs(1)])
            with pytest.raises(LinkBroken):
                await stand.received(0)

    asyncio.run(main())


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is silent for two seconds is gone."""
    monkeypatch.setattr(curve_sockets, "_ASKED_S", 1)
    monkeypatch.setattr(curve_sockets, "_SILENT_S", 2)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("says", [(), (NeedSlabs(1),)], ids=["quiet", "busy"])
def test_a_link_to_a_machine_that_is_gone_is_broken(says: Sequence[NodeMessage]) -> None:
    async def main() -> None:
        async with standing() as stand:
            stand.to_node.cut()
            if says:
                stand.link.send(says)
            with pytest.raises(LinkBroken):
                await stand.received()

    asyncio.run(main())


@pytest.mark.usefixtures("soon")
def test_a_link_to_a_launcher_that_stands_still_is_not_broken() -> None:
    """It goes on, and so does the instance."""

    async def main() -> None:
        async with standing() as stand:
            stand.to_node.stand_still()
            stand.to_proxy.stand_still()
            stand.link.send([NeedSlabs(1)])
            assert await stand.received(4) == []
            stand.to_node.go_on()
            assert await stand.node.receive() == (WHO, [NeedSlabs(1)])
            stand.node.send(WHO, [Ping()])
            assert await stand.received() == [Ping()]

    asyncio.run(main())


def test_what_had_come_before_is_received_first() -> None:
    async def main() -> None:
        async with standing() as stand:
            stand.node.send(WHO, [Ping()])
            await stand.arrived()
            monitor = stand.wires[0].monitor
            assert monitor
            stand.to_node.reset()
            assert await asyncio.to_thread(monitor.poll, 30_000)
            assert await stand.received() == [Ping()]
            with pytest.raises(LinkBroken):
                await stand.received()

    asyncio.run(main())


def test_messages_that_wait_are_not_sent_after_those_that_were_lost() -> None:
    """No other connection is made on which they would come."""

    async def main() -> None:
        async with standing() as stand:
            stand.to_node.reset()
            monitor = stand.wires[0].monitor
            assert monitor and await asyncio.to_thread(monitor.poll, 30_000)
            stand.link.send([NeedSlabs(1)])
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(stand.node.receive(), 1)

    asyncio.run(main())


@pytest.mark.parametrize("before", [True, False], ids=["unread", "read"])
def test_the_end_of_a_node_that_has_ordered_the_end_is_none(before: bool) -> None:
    async def main() -> None:
        async with standing() as stand:
            stand.node.send(WHO, [Shutdown()])
            await stand.arrived()
            if not before:
                assert await stand.received() == [Shutdown()]
            stand.to_node.reset()
            monitor = stand.wires[0].monitor
            assert monitor and await asyncio.to_thread(monitor.poll, 30_000)
            if before:
                assert await stand.received() == [Shutdown()]
            await stand.until(lambda: stand.wires[0].broke_s is not None)
            assert await stand.received(0) == []

    asyncio.run(main())


def test_a_link_to_a_proxy_that_is_not_lost_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curve_sockets, "_DROPPED_WITHIN_S", 0.1)

    async def main() -> None:
        async with standing() as stand:
            stand.to_proxy.reset()
            with pytest.raises(LinkBroken) as broken:
                await stand.received()
                await stand.received()
            assert str(broken.value) == f"the link to a proxy at {stand.to_proxy.address} broke"

    asyncio.run(main())


def test_the_end_of_a_proxy_that_is_dropped_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the time is over when the instance hears of it, as after a long step."""

    async def main() -> None:
        async with standing() as stand:
            stand.to_proxy.reset()
            proxys = stand.wires[1]
            await stand.until(lambda: proxys.broke_s is not None)
            stand.node.send(WHO, [DropProxy(PROXY)])
            await stand.arrived()
            monkeypatch.setattr(curve_sockets, "_DROPPED_WITHIN_S", 0)
            assert await stand.received() == [DropProxy(PROXY)]
            stand.node.send(WHO, [Ping()])
            assert await stand.received() == [Ping()]
            assert await stand.received(0) == []

    asyncio.run(main())


def test_a_proxy_that_is_dropped_before_its_link_breaks_costs_nothing() -> None:
    async def main() -> None:
        async with standing() as stand:
            stand.node.send(WHO, [DropProxy(PROXY)])
            assert await stand.received() == [DropProxy(PROXY)]
            stand.to_proxy.reset()
            stand.node.send(WHO, [Ping()])
            assert await stand.received() == [Ping()]
            assert len(stand.wires) == 1

    asyncio.run(main())


def test_a_process_whose_link_breaks_says_so_and_ends_with_3(capsys: pytest.CaptureFixture[str]) -> None:
    async def main() -> str:
        async with standing() as stand:

            def serve() -> None:
                while Shutdown() not in stand.link.receive(100 * NS_PER_MS):
                    pass

            serving = asyncio.create_task(asyncio.to_thread(exit_code, InstanceId("mixed-0"), serve))
            stand.to_node.reset()
            assert await serving == 3
            return stand.to_node.address

    address = asyncio.run(main())
    assert (
        capsys.readouterr().err == f"aegis: mixed-0: the link to the launcher at {address} broke; it is started again\n"
    )


def test_a_process_that_is_told_to_end_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        async with standing() as stand:

            def serve() -> None:
                while Shutdown() not in stand.link.receive(100 * NS_PER_MS):
                    pass

            stand.node.send(WHO, [Shutdown()])
            assert await asyncio.to_thread(exit_code, InstanceId("mixed-0"), serve) == 0

    asyncio.run(main())
    assert capsys.readouterr().err == ""


def test_nothing_of_a_link_stays_open() -> None:
    """A monitor that is open would keep its context from ending."""

    async def main() -> None:
        async with standing() as stand:
            wires = stand.link._wires
            stand.link.leave(PROXY)
            stand.link.close()
            assert isinstance(wires, CurveWires) and wires._context.closed
            with pytest.raises(zmq.ZMQError):
                wires._context.socket(zmq.DEALER)

    asyncio.run(main())
