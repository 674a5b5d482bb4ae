"""The launcher on the bus: its claim of the prefix, the death of instances, and the orders of users."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import platform
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Protocol
from uuid import uuid4

import msgspec
from msgspec.structs import replace

from aegis.config.mqtt_address import Address
from aegis.control.commands import CommandLog, Unanswerable, read
from aegis.control.connection import Connection
from aegis.control.embedded_broker import embedded_broker
from aegis.control.failure_detector import (
    ECHO_NS,
    ConnectionLost,
    Ended,
    Event,
    FailureDetector,
    Fence,
    HeartbeatReceived,
    OwnHeartbeatReceived,
    Probe,
    ProbeAnswered,
)
from aegis.control.messages import (
    PROTOCOL,
    UNREADABLE,
    Add,
    Beat,
    Claim,
    ClusterOrder,
    Command,
    Heartbeat,
    InstanceState,
    Order,
    Phase,
    Reply,
)
from aegis.control.settings import BusSettings
from aegis.control.topics import CLUSTER, Topics
from aegis.core.clock import NS_PER_S, Clock
from aegis.core.errors import UserError
from aegis.core.ids import InstanceId
from aegis.process.tasks import cancelled, watched
from aegis.telemetry.logs import log
from aegis.telemetry.node_report import BusPlace

_ECHO_S = ECHO_NS / NS_PER_S
_CLAIM_S = 5.0  # that a claim has to come back in
_RIVAL_S = 10 * _ECHO_S  # in which a living rival is heard
_RECLAIM_S = 1.0  # two that both believe to be first must not shout each other down

_logger = logging.getLogger(__name__)


class Node(Protocol):
    """The owner of the instances."""

    def probe(self, instance: InstanceId) -> None:
        """Over the instance's own link; `Bus.answered` follows, if it lives."""
        ...

    def fence(self, instance: InstanceId, incarnation: int, why: str) -> None:
        """Ends that process, if it is still the instance's."""
        ...

    def has(self, instance: InstanceId) -> bool:
        """Whether there is one of that name."""
        ...

    async def do(self, instance: str, command: Command | Add) -> str:
        """Does the command and returns the result in one line. Raises UserError if it cannot be done."""
        ...


class Bus:
    """The launcher's end of the bus, of one event loop."""

    def __init__(self, address: Address, prefix: str, clock: Clock) -> None:
        self.settings = BusSettings(address=address, prefix=prefix, cluster=uuid4().hex[:12])
        self._clock = clock
        self._topics = Topics(prefix)
        self._claim = Claim(
            cluster=self.settings.cluster, node=platform.node(), pid=os.getpid(), phase=Phase.UP, protocol=PROTOCOL
        )
        self._node: Node | None = None
        self._detector = FailureDetector()
        self._orders = CommandLog()
        self._tasks: set[asyncio.Task[None]] = set()
        self._claimed = asyncio.Event()  # our claim came back
        self._contested = False  # another claim came before it
        self._rival: Beat | None = None  # of another cluster that lives
        self._rival_beats = asyncio.Event()
        self._ours = False  # the prefix
        self._reclaiming = False
        self._connection = Connection(
            address,
            name=f"{self.settings.cluster}-launcher",
            subscriptions=(
                self._topics.claim,
                self._topics.beat,
                self._topics.state("+"),
                self._topics.heartbeat("+"),
                self._topics.commands("+"),
                self._topics.commands(CLUSTER),
            ),
            on_message=self._received,
            on_up=lambda: self._spawn(self._publish_claim(Phase.UP)),
            will=(self._topics.claim, replace(self._claim, phase=Phase.LOST)),
        )

    @property
    def place(self) -> BusPlace:
        return BusPlace(str(self.settings.address), self.settings.prefix)

    @property
    def is_up(self) -> bool:
        """Whether the broker can be reached."""
        return self._connection.is_up

    # --- coming and going ---------------------------------------------------------------------------------------------

    def open_private(self) -> None:
        """Connects to the private broker, which may not be there yet."""
        self._connection.keep()
        self._begin()

    async def open_shared(self) -> None:
        """Raises UserError if the broker cannot be used, or if its prefix is another cluster's."""
        await self._connection.open()
        try:
            async with asyncio.timeout(_CLAIM_S):
                await self._claimed.wait()
            if self._contested:  # perhaps by one that was lost without a will, as its broker was
                async with asyncio.timeout(_RIVAL_S):
                    await self._rival_beats.wait()
        except TimeoutError:
            if not self._claimed.is_set():
                raise UserError(
                    f"the MQTT broker at {self.settings.address} does not deliver what is published to "
                    f"{self._topics.claim}; may the user read and write below {self.settings.prefix}/?"
                ) from None
        if self._rival:
            raise UserError(
                f"a cluster on {self._rival.node} (pid {self._rival.pid}) already uses the prefix "
                f"'{self.settings.prefix}' of the MQTT broker at {self.settings.address}; give this one another "
                "--mqtt-prefix"
            )
        self._begin()

    def _begin(self) -> None:
        self._ours = True
        self._spawn(self._publish_beats())

    @contextmanager
    def serving(self, node: Node) -> Iterator[None]:
        """Meanwhile it does what is ordered."""
        self._node = node
        try:
            yield
        finally:
            self._node = None

    async def close(self) -> None:
        await cancelled(*self._tasks)
        if self._ours:
            await self._publish_claim(Phase.STOPPED)
        await self._connection.close()

    # --- what the node says -------------------------------------------------------------------------------------------

    def answered(self, instance: InstanceId) -> None:
        """The instance lives, as its own link says."""
        self._detect(ProbeAnswered(instance))

    def ended(self, instance: InstanceId) -> None:
        """The instance's process is gone."""
        self._detect(Ended(instance))

    def removed(self, instance: InstanceId) -> None:
        """There is none of that name any more; nor is its state kept."""
        self._spawn(self._connection.clear(self._topics.state(instance)))

    # ------------------------------------------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = watched(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _publish_beats(self) -> None:
        claim = self._claim
        for number in itertools.count():
            beat = Beat(cluster=claim.cluster, node=claim.node, pid=claim.pid, number=number)
            await self._connection.publish(self._topics.beat, beat)
            await asyncio.sleep(_ECHO_S)

    async def _publish_claim(self, phase: Phase) -> None:
        await self._connection.publish(self._topics.claim, replace(self._claim, phase=phase), qos=1, retain=True)

    def _received(self, topic: str, payload: bytes) -> None:
        """Takes any message that anyone may publish to a broker that is not ours alone."""
        about = self._topics.instance_of(topic)
        try:
            if topic == self._topics.beat:
                self._on_beat(msgspec.json.decode(payload, type=Beat))
            elif topic == self._topics.claim:
                if payload:
                    self._on_claim(msgspec.json.decode(payload, type=Claim))
            elif topic == self._topics.commands(CLUSTER):
                self._on_order(CLUSTER, payload)
            elif about and about[1] == "heartbeat":
                self._on_heartbeat(about[0], msgspec.json.decode(payload, type=Heartbeat))
            elif about and about[1] == "state":
                if payload:
                    self._on_state(about[0], msgspec.json.decode(payload, type=InstanceState))
            elif about and about[1] == "commands":
                self._on_order(about[0], payload)
        except (*UNREADABLE, Unanswerable) as error:
            log(_logger, logging.WARNING, "nothing that can be read", {"topic": topic, "why": str(error)})

    # --- clusters -----------------------------------------------------------------------------------------------------

    def _on_beat(self, beat: Beat) -> None:
        if beat.cluster == self._claim.cluster:
            self._detect(OwnHeartbeatReceived())
        else:
            self._rival = beat
            self._rival_beats.set()

    def _on_claim(self, claim: Claim) -> None:
        if claim.cluster == self._claim.cluster:
            self._claimed.set()
        elif claim.phase is not Phase.UP:
            pass
        elif not self._claimed.is_set():
            self._contested = True
        elif self._ours and not self._reclaiming:
            log(_logger, logging.WARNING, "another cluster claims this prefix", {"node": claim.node, "pid": claim.pid})
            self._reclaiming = True
            self._spawn(self._reclaim())

    async def _reclaim(self) -> None:
        await asyncio.sleep(_RECLAIM_S)
        self._reclaiming = False
        await self._publish_claim(Phase.UP)

    # --- instances ----------------------------------------------------------------------------------------------------

    def _on_heartbeat(self, instance: str, beat: Heartbeat) -> None:
        _check_sender(instance, beat)
        if beat.cluster == self._claim.cluster and beat.protocol == PROTOCOL:
            self._detect(HeartbeatReceived(InstanceId(beat.instance), beat.incarnation, beat.progress))

    def _on_state(self, instance: str, state: InstanceState) -> None:
        _check_sender(instance, state)
        if state.cluster != self._claim.cluster:
            return
        if state.protocol != PROTOCOL and self._node:
            why = f"it speaks protocol {state.protocol}, the launcher {PROTOCOL}: install the same version everywhere"
            self._node.fence(InstanceId(state.instance), state.incarnation, why)
        elif state.phase is Phase.LOST:
            self._detect(ConnectionLost(InstanceId(state.instance), state.incarnation))
        if self._node and not self._node.has(InstanceId(state.instance)):  # the last word of one that was removed
            self.removed(InstanceId(state.instance))

    def _detect(self, event: Event) -> None:
        for effect in self._detector.on(event, self._clock.now_ns()):
            if self._node is None:
                continue
            match effect:
                case Probe(instance):
                    self._node.probe(instance)
                case Fence(instance, incarnation, why):
                    self._node.fence(instance, incarnation, why)

    # --- orders -------------------------------------------------------------------------------------------------------

    def _on_order(self, instance: str, payload: bytes) -> None:
        order = read(payload, instance)
        if isinstance(order, tuple):
            self._spawn(self._reply(*order))
            return
        begun = self._orders.begin(instance, order)
        if isinstance(begun, Reply):
            self._spawn(self._reply(order.client, begun))
        elif begun:
            self._spawn(self._do(instance, order))

    async def _do(self, instance: str, order: Order | ClusterOrder) -> None:
        try:
            if self._node is None:
                raise UserError("the cluster is starting or stopping; try again soon")
            done, message = True, await self._node.do(instance, order.command)
        except UserError as error:
            done, message = False, error.message
        except asyncio.CancelledError:
            ending = Reply(id=order.id, instance=instance, done=False, message="the server is shutting down")
            await self._connection.publish(self._topics.replies(instance, order.client), ending, qos=1)
            raise
        reply = Reply(id=order.id, instance=instance, done=done, message=message)
        self._orders.end(instance, order, reply)
        await self._reply(order.client, reply)

    async def _reply(self, client: str, reply: Reply) -> None:
        """Sends the reply, once the broker is there."""
        topic = self._topics.replies(reply.instance, client)
        while not await self._connection.publish(topic, reply, qos=1):
            await asyncio.sleep(_ECHO_S)


def _check_sender(instance: str, message: Heartbeat | InstanceState) -> None:
    """Raises ValidationError unless the message is of the instance whose topic it came in."""
    if message.instance != instance:
        raise msgspec.ValidationError(f"it is of the instance {message.instance!r}")


@asynccontextmanager
async def open_bus(url: Address | None, prefix: str, directory: Path, clock: Clock) -> AsyncIterator[Bus]:
    """On the broker at `url`, else on one of its own in the directory. Raises UserError if that cannot be used."""
    async with contextlib.AsyncExitStack() as stack:
        address = url if url is not None else await stack.enter_async_context(embedded_broker(directory))
        bus = Bus(address, prefix, clock)
        try:
            if url:
                await bus.open_shared()
            else:
                bus.open_private()
            yield bus
        finally:
            await bus.close()
