"""The links of a market: msgpack messages in batches, on private sockets, or encrypted between machines.

An instance has one link to its node and one to each proxy, so that messages about a request pass through nobody else.
Its identity on all of them is `name/incarnation`, so that messages of a dead process can be told from those of its
successor. A proxy that is not in the node's process has a link to the node besides.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from aegis.core.clock import NS_PER_MS
from aegis.core.ids import ProxyId, proxy_of
from aegis.core.messages import (
    Broken,
    BroughtIn,
    DropProxy,
    FromInstance,
    GaveUp,
    Greeting,
    HandedOver,
    KvReleased,
    Phase,
    Prefilled,
    PromptLogprobs,
    Reused,
    Shutdown,
    Started,
    StepsTook,
    SwitchDone,
    ToInstance,
    Tokens,
)
from aegis.telemetry.decisions import Decisions
from aegis.telemetry.spans import Spans
from aegis.transport.addresses import Keys, is_local
from aegis.transport.failures import LinkBroken
from aegis.transport.unix_sockets import LocalEnd, LocalPort, LocalWire, LocalWires

T = TypeVar("T")

_OF_ONE_REQUEST: frozenset[object] = frozenset(
    {Broken, GaveUp, HandedOver, KvReleased, Prefilled, PromptLogprobs, Reused, Started, Tokens}
)


def addressed(messages: Sequence[T], proxies: Iterable[ProxyId]) -> dict[ProxyId | None, list[T | Phase]]:
    """An instance's messages by their receivers, in order; None is the node. A proxy gets those on its own requests,
    the node those on memory, models and the instance's life. `proxies` get every switch, the times of steps and
    what is brought in for their requests."""
    mail: defaultdict[ProxyId | None, list[T | Phase]] = defaultdict(list)
    for message in messages:
        if type(message) in _OF_ONE_REQUEST:
            mail[proxy_of(message.request)].append(message)  # type: ignore[attr-defined]
        elif isinstance(message, Phase):
            for proxy, part in _phases(message).items():
                mail[proxy].append(part)
        elif isinstance(message, SwitchDone):
            for somebody in (None, *proxies):
                mail[somebody].append(message)
        elif isinstance(message, StepsTook | BroughtIn):
            for proxy in proxies:
                mail[proxy].append(message)
        else:
            mail[None].append(message)
    return mail


def _phases(phase: Phase) -> dict[ProxyId, Phase]:
    """A batch may have requests of several proxies."""
    requests = defaultdict(list)
    for request in phase.requests:
        requests[proxy_of(request)].append(request)
    return {proxy: Phase(tuple(own), phase.running) for proxy, own in requests.items()}


NodeMessage = FromInstance | Spans | Decisions
"""The messages of an instance."""


_encoder = msgspec.msgpack.Encoder()
_to_instance = msgspec.msgpack.Decoder(list[ToInstance])


class _Wire(Protocol):
    def send(self, body: bytes) -> None: ...

    def receive(self) -> list[bytes]: ...


class _Wires(Protocol):
    def connected(self, address: str) -> _Wire: ...

    def cut(self, wire: Any) -> None: ...

    def heed(self, descriptor: int) -> None: ...

    def wait(self, timeout_ms: int) -> Sequence[_Wire]:
        """Raises LinkBroken."""
        ...

    def close(self) -> None: ...


class InstanceLink:
    """An instance's end of all its links; blocking, one thread. `market_key` is the public one, if there is one."""

    def __init__(self, node_address: str, identity: str, market_key: str = "") -> None:
        self._wires = _wires(node_address, identity, market_key)
        self._node = self._wires.connected(node_address)
        self._proxies: dict[ProxyId, _Wire] = {}
        self._is_ending = False

    def meet(self, proxy: ProxyId, address: str, greeting: Greeting) -> None:
        """Messages about its requests go there from now on, after the greeting."""
        wire = self._proxies[proxy] = self._wires.connected(address)
        wire.send(_encoder.encode([greeting]))

    def leave(self, proxy: ProxyId) -> None:
        """The proxy is lost: messages of it that were not received yet never are."""
        wire = self._proxies.pop(proxy, None)
        if wire:
            self._wires.cut(wire)

    def heed(self, descriptor: int) -> None:
        """Whatever waits in `receive` waits no longer once this descriptor can be read."""
        self._wires.heed(descriptor)

    def send(self, messages: Sequence[NodeMessage]) -> None:
        """Sends each message to its receivers at once; messages to a lost proxy are dropped."""
        for proxy, its in addressed(messages, self._proxies).items():
            wire = self._node if proxy is None else self._proxies.get(proxy)
            if wire:
                wire.send(_encoder.encode(its))

    def receive(self, timeout_ns: int) -> list[ToInstance]:
        """The messages that are there; waits up to `timeout_ns`, to the next millisecond, for the first. Raises
        LinkBroken, unless the instance is to end: then the others may be gone before it."""
        try:
            ready = self._wires.wait(-(-timeout_ns // NS_PER_MS))
        except LinkBroken:
            if not self._is_ending:
                raise
            ready = ()
        messages: list[ToInstance] = []
        if self._node in ready:
            messages += _all(_to_instance, self._node.receive())
            for message in messages:
                if isinstance(message, DropProxy):
                    self.leave(message.proxy)
                self._is_ending = self._is_ending or isinstance(message, Shutdown)
        for wire in self._proxies.values():
            if wire in ready:
                messages += _all(_to_instance, wire.receive())
        return messages

    def close(self) -> None:
        self._wires.close()


def _wires(node_address: str, identity: str, market_key: str) -> _Wires:
    if is_local(node_address):
        return LocalWires(identity)
    from aegis.transport.curve_sockets import CurveWires

    return CurveWires(identity, market_key)


class _Inbox:
    """Received messages, in order, for one reader."""

    def __init__(self) -> None:
        self._received: deque[tuple[str, list[bytes]]] = deque()
        self._arrived = asyncio.Event()

    def put(self, identity: str, messages: list[bytes]) -> None:
        self._received.append((identity, messages))
        self._arrived.set()

    async def take(self) -> tuple[str, list[bytes]]:
        while not self._received:
            self._arrived.clear()
            await self._arrived.wait()
        return self._received.popleft()


class _Port(Protocol):
    address: str

    def send(self, identity: str, body: bytes) -> None: ...

    def close(self) -> None: ...


class Hub(Generic[T]):
    """The end that many are connected to: a node's or a proxy's, of one event loop. `said` is the type of their
    messages. A port that is left open (`tcp://127.0.0.1:*`) is found in `address`."""

    def __init__(self, address: str, said: Any, keys: Keys | None = None) -> None:
        self._decoder = msgspec.msgpack.Decoder(list[said])
        self._inbox = _Inbox()
        self._port = self._opened(address, keys)
        self.address = self._port.address

    def send(self, identity: str, messages: Sequence[object]) -> None:
        """Sends at once; messages to an identity that is gone are dropped, because its death is handled elsewhere."""
        self._port.send(identity, _encoder.encode(messages))

    async def receive(self) -> tuple[str, list[T]]:
        """The messages that one sender has sent so far, and its identity."""
        identity, bodies = await self._inbox.take()
        return identity, _all(self._decoder, bodies)

    def close(self) -> None:
        self._port.close()

    def _opened(self, address: str, keys: Keys | None) -> _Port:
        if is_local(address):
            return LocalPort(address, self._inbox.put)
        from aegis.transport.curve_sockets import CurvePort

        assert keys, "what other machines reach is encrypted"
        return CurvePort(address, self._inbox.put, keys)


class Spoke(Generic[T]):
    """An end connected to a hub on this machine, of one event loop. `told` is the type of the hub's messages."""

    def __init__(self, address: str, identity: str, told: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(list[told])
        self._inbox = _Inbox()
        self._end = LocalEnd(LocalWire.to(address, identity), lambda bodies: self._inbox.put("", bodies))

    def send(self, messages: Sequence[object]) -> None:
        self._end.send(_encoder.encode(messages))

    async def receive(self) -> list[T]:
        _, bodies = await self._inbox.take()
        return _all(self._decoder, bodies)

    def close(self) -> None:
        self._end.close()


def _all(decoder: msgspec.msgpack.Decoder[Any], bodies: Sequence[bytes]) -> list[Any]:
    return [message for body in bodies for message in decoder.decode(body)]
