"""The launcher's side against real brokers."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import aiomqtt
import msgspec
import pytest

from aegis.config.mqtt_address import Address
from aegis.control.bus import Bus, open_bus
from aegis.control.client import order
from aegis.control.connection import Connection
from aegis.control.messages import (
    PROTOCOL,
    Add,
    Claim,
    Command,
    Heartbeat,
    InstanceState,
    Order,
    Phase,
    Pin,
    Reply,
    Unpin,
    encode,
)
from aegis.control.progress import STEP_S_MAX, LoopProgress
from aegis.control.settings import BusSettings
from aegis.control.topics import CLUSTER
from aegis.core.errors import UserError
from aegis.core.ids import InstanceId
from aegis.core.role import Role
from aegis.instance.heartbeats import HeartbeatAgent
from aegis.process.clock import MonotonicClock
from tests import brokers
from tests.brokers import Broker

NAME = "mixed-0"


@pytest.fixture(scope="module", params=brokers.KINDS)
def broker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with brokers.running(request.param, tmp_path_factory.mktemp("broker")) as running:
        yield running


@dataclass
class Recorded:
    """A node that does what it is ordered at once, and keeps what it was asked."""

    commands: list[tuple[str, Command | Add]] = field(default_factory=list)
    probed: list[InstanceId] = field(default_factory=list)
    fenced: list[tuple[InstanceId, int, str]] = field(default_factory=list)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)

    def probe(self, instance: InstanceId) -> None:
        self.probed.append(instance)

    def fence(self, instance: InstanceId, incarnation: int, why: str) -> None:
        self.fenced.append((instance, incarnation, why))

    def has(self, instance: InstanceId) -> bool:
        return instance == NAME

    async def do(self, instance: str, command: Command | Add) -> str:
        self.commands.append((instance, command))
        if instance not in (NAME, CLUSTER):
            raise UserError(f"there is no instance named '{instance}'")
        await self.go_on.wait()
        return "done"


@contextlib.asynccontextmanager
async def serving(broker: Broker, prefix: str) -> AsyncIterator[tuple[Bus, Recorded]]:
    async with open_bus(broker.address, prefix, Path("/nonexistent"), MonotonicClock()) as bus:
        node = Recorded()
        node.go_on.set()
        with bus.serving(node):
            yield bus, node


def client_of(broker: Broker) -> aiomqtt.Client:
    address = broker.address
    return aiomqtt.Client(
        address.path or address.host,
        address.port or 1883,
        username=address.user,
        password=address.password,
        transport="unix" if address.path else "tcp",
    )


async def retained(broker: Broker, topic: str) -> bytes:
    async with client_of(broker) as client:
        await client.subscribe(topic, qos=1)
        return (await heard(client, topic, 1))[0]


async def heard(client: aiomqtt.Client, topic: str, count: int) -> list[bytes]:
    """The next payloads of the topic; amqtt sends whoever connects retained messages of others too."""
    payloads: list[bytes] = []
    async with asyncio.timeout(10):
        while len(payloads) < count:
            message = await anext(client.messages)
            if message.topic.value == topic:
                assert isinstance(message.payload, bytes)
                payloads.append(message.payload)
    return payloads


def agent(settings: BusSettings, loop_progress: LoopProgress, *, protocol: int = PROTOCOL) -> HeartbeatAgent:
    settings = msgspec.structs.replace(settings, protocol=protocol)
    return HeartbeatAgent(settings, loop_progress, instance=InstanceId(NAME), incarnation=1, role=Role.MIXED)


def test_an_order_is_done_and_answered(broker: Broker) -> None:
    async def main() -> tuple[Reply, Reply, Recorded]:
        async with serving(broker, "orders") as (_, node):
            done = await order(broker.address, "orders", NAME, Pin("llama"), timeout_s=10)
            refused = await order(broker.address, "orders", "mixed-9", Unpin("llama"), timeout_s=10)
            return done, refused, node

    done, refused, node = asyncio.run(main())
    assert (done.done, done.message, done.instance) == (True, "done", NAME)
    assert (refused.done, refused.message) == (False, "there is no instance named 'mixed-9'")
    assert node.commands == [(NAME, Pin("llama")), ("mixed-9", Unpin("llama"))]


def test_the_cluster_is_ordered_too(broker: Broker) -> None:
    async def main() -> tuple[Reply, Reply, Recorded]:
        async with serving(broker, "grow") as (_, node), client_of(broker) as client:
            done = await order(broker.address, "grow", CLUSTER, Add(Role.DECODE, 2), timeout_s=10)
            await client.subscribe("grow/cluster/replies/me", qos=1)
            unknown = Order(id="1", client="me", command=Pin("llama"))
            await client.publish("grow/cluster/commands", encode(unknown), qos=1)
            (refused,) = await heard(client, "grow/cluster/replies/me", 1)
            return done, msgspec.json.decode(refused, type=Reply), node

    done, refused, node = asyncio.run(main())
    assert (done.done, done.message, done.instance) == (True, "done", CLUSTER)
    assert not refused.done and refused.message.startswith("no such order: ")
    assert node.commands == [(CLUSTER, Add(Role.DECODE, 2))]


def test_what_is_retained_of_an_instance_that_was_removed_is_cleared(broker: Broker) -> None:
    async def main() -> list[str]:
        async with serving(broker, "left") as (bus, _), client_of(broker) as client:
            await client.subscribe("left/instances/mixed-7/state", qos=1)
            for name in (NAME, "mixed-7"):
                state = InstanceState(
                    cluster=bus.settings.cluster,
                    instance=name,
                    incarnation=1,
                    phase=Phase.STOPPED,
                    role=Role.MIXED,
                    node="",
                    pid=1,
                )
                await client.publish(f"left/instances/{name}/state", encode(state), qos=1, retain=True)
            async with asyncio.timeout(10):
                while (message := await anext(client.messages)).payload:
                    pass
            kept = msgspec.json.decode(await retained(broker, f"left/instances/{NAME}/state"), type=InstanceState)
            return [message.topic.value, kept.instance]

    assert asyncio.run(main()) == ["left/instances/mixed-7/state", NAME]


@pytest.mark.parametrize("name", ["a+b", "x/#", "mixed-7"])
def test_what_is_said_of_one_instance_in_the_topic_of_another_is_passed_over(broker: Broker, name: str) -> None:
    said = {"instance": name, "incarnation": 1, "phase": "lost", "role": "mixed", "node": "", "pid": 1}

    async def main() -> tuple[Reply, Recorded, list[str]]:
        async with serving(broker, "astray") as (bus, node), client_of(broker) as client:
            await client.subscribe("astray/instances/mixed-7/state", qos=1)
            for protocol in (PROTOCOL, PROTOCOL + 1):
                state = msgspec.json.encode(said | {"cluster": bus.settings.cluster, "protocol": protocol})
                await client.publish(f"astray/instances/{NAME}/state", state, qos=1)
            beat = Heartbeat(cluster=bus.settings.cluster, instance=name, incarnation=1, number=1, progress=1)
            await client.publish(f"astray/instances/{NAME}/heartbeat", encode(beat), qos=1)
            reply = await order(broker.address, "astray", NAME, Pin("llama"), timeout_s=10)
            await client.publish("astray/instances/mixed-7/state", b"last", qos=1)
            cleared = [payload.decode() for payload in await heard(client, "astray/instances/mixed-7/state", 1)]
            return reply, node, cleared

    reply, node, cleared = asyncio.run(main())
    assert reply.done
    assert (node.probed, node.fenced, cleared) == ([], [], ["last"])


def test_what_is_nested_too_deeply_is_passed_over(broker: Broker) -> None:
    nested = b'{"x":' + b"[" * 2_000 + b"]" * 2_000 + b"}"
    topics = ["cluster", "cluster/beat", "cluster/commands"]
    topics += [f"instances/{NAME}/{what}" for what in ("state", "heartbeat", "commands")]

    async def main() -> Reply:
        async with serving(broker, "nested"), client_of(broker) as client:
            for topic in topics:
                await client.publish(f"nested/{topic}", nested, qos=1)
            return await order(broker.address, "nested", NAME, Pin("llama"), timeout_s=10)

    assert asyncio.run(main()).done


@pytest.mark.parametrize("payload", [b"", b"{}", b'{"x":' + b"[" * 2_000 + b"]" * 2_000 + b"}"])
def test_a_client_passes_over_what_is_no_reply(broker: Broker, payload: bytes) -> None:
    async def main() -> Reply:
        async with client_of(broker) as client:
            await client.subscribe(f"replied/instances/{NAME}/commands", qos=1)
            waiting = asyncio.create_task(order(broker.address, "replied", NAME, Pin("llama"), timeout_s=10))
            (command,) = await heard(client, f"replied/instances/{NAME}/commands", 1)
            wanted = msgspec.json.decode(command, type=Order)
            reply = Reply(id=wanted.id, instance=NAME, done=True, message="done")
            for said in (payload, encode(reply)):
                await client.publish(f"replied/instances/{NAME}/replies/{wanted.client}", said, qos=1)
            return await waiting

    assert asyncio.run(main()).done


def test_a_message_that_cannot_be_handled_costs_no_other(broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> list[bytes]:
        taken: list[bytes] = []
        all_taken = asyncio.Event()

        def take(topic: str, payload: bytes) -> None:
            if topic != "bug":  # amqtt sends retained messages of others too
                return
            if payload == b"first":
                raise RuntimeError("a bug")
            taken.append(payload)
            all_taken.set()

        connection = Connection(broker.address, name="buggy", subscriptions=["bug"], on_message=take)
        await connection.open()
        try:
            async with client_of(broker) as client, asyncio.timeout(10):
                for payload in (b"first", b"second"):
                    await client.publish("bug", payload, qos=1)
                await all_taken.wait()
        finally:
            await connection.close()
        return taken

    assert asyncio.run(main()) == [b"second"]
    (record,) = caplog.records
    assert (record.levelname, record.getMessage()) == ("ERROR", "message not handled, for a bug")
    assert record.exc_info


@pytest.mark.parametrize("topic", ["astray/a+b", "astray/#", "x" * 70_000])
def test_what_no_broker_takes_is_not_tried_again(broker: Broker, topic: str, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> bool:
        connection = Connection(
            broker.address, name="astray", subscriptions=(), on_message=lambda _topic, _payload: None
        )
        await connection.open()
        try:
            await connection.clear(topic)
            return await connection.publish(topic, Reply(id="1", instance=NAME, done=True, message=""), qos=1)
        finally:
            await connection.close()

    assert asyncio.run(main())
    assert [record.getMessage() for record in caplog.records] == ["nothing that can be published"] * 2


def test_a_repeated_id_is_not_done_twice(broker: Broker) -> None:
    wanted = Order(id="7", client="me", command=Pin("llama"))

    async def main() -> tuple[list[bytes], Recorded]:
        async with serving(broker, "twice") as (_, node), client_of(broker) as client:
            node.go_on.clear()
            await client.subscribe("twice/instances/+/replies/me", qos=1)
            for _ in range(3):
                await client.publish(f"twice/instances/{NAME}/commands", encode(wanted), qos=1)
            last = msgspec.structs.replace(wanted, id="8", command=Unpin("llama"))
            await client.publish(f"twice/instances/{NAME}/commands", encode(last), qos=1)
            async with asyncio.timeout(10):
                while len(node.commands) < 2:
                    await asyncio.sleep(0.01)
            node.go_on.set()
            topic = f"twice/instances/{NAME}/replies/me"
            payloads = await heard(client, topic, 2)
            await client.publish(f"twice/instances/{NAME}/commands", encode(wanted), qos=1)
            return payloads + await heard(client, topic, 1), node

    payloads, node = asyncio.run(main())
    replies = [msgspec.json.decode(payload, type=Reply) for payload in payloads]
    assert [reply.id for reply in replies] == ["7", "8", "7"]
    assert replies[2] == replies[0]
    assert node.commands == [(NAME, Pin("llama")), (NAME, Unpin("llama"))]


def test_a_second_cluster_is_refused_and_the_first_keeps_its_claim(broker: Broker) -> None:
    async def main() -> tuple[str, Claim, str]:
        async with serving(broker, "claimed") as (first, _):
            for _ in range(3):
                with pytest.raises(UserError) as refused:
                    async with serving(broker, "claimed"):
                        raise AssertionError("two clusters on one prefix")
            claim = Claim(cluster="", node="", pid=0, phase=Phase.LOST)
            async with asyncio.timeout(10):
                while claim.cluster != first.settings.cluster:
                    claim = msgspec.json.decode(await retained(broker, "claimed/cluster"), type=Claim)
            async with serving(broker, "claimed/beside"):
                pass
            return refused.value.message, claim, first.settings.cluster

    message, claim, first = asyncio.run(main())
    assert "--mqtt-prefix" in message
    assert brokers.PASSWORD not in message
    assert (claim.cluster, claim.phase) == (first, Phase.UP)


def test_the_claim_of_a_dead_cluster_is_taken_over(broker: Broker) -> None:
    dead = Claim(cluster="dead", node="host", pid=1, phase=Phase.UP)

    async def main() -> None:
        async with client_of(broker) as client:
            await client.publish("stale/cluster", encode(dead), qos=1, retain=True)
        async with serving(broker, "stale"):
            pass

    asyncio.run(main())
    assert msgspec.json.decode(asyncio.run(retained(broker, "stale/cluster")), type=Claim).phase is Phase.STOPPED


def test_an_instance_tells_its_state_and_beats(broker: Broker) -> None:
    async def main() -> tuple[dict[str, object], dict[str, object], int, Recorded]:
        async with serving(broker, "life") as (bus, node), client_of(broker) as client:
            await client.subscribe(f"life/instances/{NAME}/heartbeat")
            loop_progress = LoopProgress()
            loop_progress.up = True
            instance = agent(bus.settings, loop_progress)
            instance.start()
            beats = []
            for _ in range(3):
                loop_progress.passes += 1
                beats += await heard(client, f"life/instances/{NAME}/heartbeat", 1)
            up = msgspec.json.decode(await retained(broker, f"life/instances/{NAME}/state"))
            await asyncio.to_thread(instance.close)
            stopped = msgspec.json.decode(await retained(broker, f"life/instances/{NAME}/state"))
            return up, stopped, len(beats), node

    up, stopped, beats, node = asyncio.run(main())
    assert (up["phase"], up["role"], up["protocol"], beats) == ("up", "mixed", PROTOCOL, 3)
    assert stopped["phase"] == "stopped"
    assert node.fenced == []


def _hang(settings: BusSettings) -> None:
    """An instance whose main loop makes no pass and uses no processor: all that goes on is what says how it is."""
    loop_progress = LoopProgress()
    loop_progress.up = True
    agent(settings, loop_progress).start()
    threading.Event().wait()


def test_a_main_loop_that_hangs_is_fenced(broker: Broker) -> None:
    async def main() -> Recorded:
        async with serving(broker, "hung") as (bus, node):
            instance = multiprocessing.get_context("spawn").Process(target=_hang, args=(bus.settings,))
            instance.start()  # in a process of its own: the processor time of this one is the launcher's
            try:
                async with asyncio.timeout(STEP_S_MAX / 2):  # then it is fenced however busy it seems
                    while not node.fenced:
                        await asyncio.sleep(0.05)
            finally:
                instance.kill()
                await asyncio.to_thread(instance.join)
            return node

    node = asyncio.run(main())
    assert set(node.probed) == {NAME}  # again after each pause of the broker
    assert node.fenced == [(NAME, 1, "its main loop, or one of its lanes, does not get on")]


def test_an_instance_of_another_version_is_refused_by_both_sides(broker: Broker) -> None:
    state = {"instance": NAME, "incarnation": 3, "phase": "up", "role": "mixed", "node": "host", "pid": 1}

    async def main() -> Recorded:
        async with serving(broker, "versions") as (bus, node), client_of(broker) as client:
            with pytest.raises(UserError, match="install the same version"):
                agent(bus.settings, LoopProgress(), protocol=PROTOCOL + 1)
            other = state | {"cluster": bus.settings.cluster, "protocol": PROTOCOL + 1}
            await client.publish(f"versions/instances/{NAME}/state", msgspec.json.encode(other), qos=1)
            async with asyncio.timeout(10):
                while not node.fenced:
                    await asyncio.sleep(0.01)
            return node

    ((instance, incarnation, why),) = asyncio.run(main()).fenced
    assert (instance, incarnation) == (NAME, 3)
    assert "install the same version" in why


def test_after_a_restart_of_the_broker_all_is_as_before(tmp_path: Path) -> None:
    for kind in brokers.KINDS:
        with brokers.running(kind, tmp_path / kind) as broker:
            reply, claim, node = asyncio.run(_through_a_restart(broker))
        assert reply.done
        assert claim.phase is Phase.UP
        assert node.fenced == []


async def _through_a_restart(broker: Broker) -> tuple[Reply, Claim, Recorded]:
    async with serving(broker, "again") as (_, node):
        broker.kill()
        broker.start()
        reply = None
        async with asyncio.timeout(20):
            while reply is None:
                with contextlib.suppress(UserError):
                    reply = await order(broker.address, "again", NAME, Pin("llama"), timeout_s=1)
        claim = msgspec.json.decode(await retained(broker, "again/cluster"), type=Claim)
        return reply, claim, node


async def _open(url_of: Broker, **change: object) -> None:
    address = msgspec.structs.replace(url_of.address, **change)
    async with open_bus(address, "refused", Path("/nonexistent"), MonotonicClock()):
        raise AssertionError("it was let in")


def test_a_broker_that_stands_still_kills_nobody(tmp_path: Path) -> None:
    async def main(broker: Broker) -> Recorded:
        async with serving(broker, "still") as (bus, node), client_of(broker) as client:
            await client.subscribe(f"still/instances/{NAME}/heartbeat")
            loop_progress = LoopProgress()
            loop_progress.up = True
            instance = agent(bus.settings, loop_progress)
            instance.start()
            turning = asyncio.create_task(_turn(loop_progress))
            await heard(client, f"still/instances/{NAME}/heartbeat", 2)
            broker.pause()
            await asyncio.sleep(4)  # longer than any silence of an instance
            broker.resume()
            await heard_anew(broker, f"still/instances/{NAME}/heartbeat", 4)
            turning.cancel()
            await asyncio.to_thread(instance.close)
            return node

    for kind in brokers.KINDS:
        with brokers.running(kind, tmp_path / kind) as broker:
            assert asyncio.run(main(broker)).fenced == []


async def _turn(loop_progress: LoopProgress) -> None:
    while True:
        loop_progress.passes += 1
        await asyncio.sleep(0.1)


async def heard_anew(broker: Broker, topic: str, count: int) -> None:
    async with client_of(broker) as client:
        await client.subscribe(topic)
        await heard(client, topic, count)


def test_orders_over_tls(tmp_path: Path) -> None:
    async def main(broker: Broker) -> Reply:
        async with serving(broker, "tls"):
            return await order(broker.address, "tls", NAME, Pin("llama"), timeout_s=10)

    with brokers.running("tls", tmp_path) as broker:
        assert asyncio.run(main(broker)).done
        with pytest.raises(UserError, match=r"no MQTT broker answers at mqtts://.*certificate") as refused:
            asyncio.run(_open(broker, ca_file=None))
    assert brokers.PASSWORD not in refused.value.message


def test_a_wrong_password_is_told_without_it(tmp_path: Path) -> None:
    with brokers.running("mosquitto", tmp_path) as broker, pytest.raises(UserError) as refused:
        asyncio.run(_open(broker, password="wrong-one"))
    assert "refuses this user and password" in refused.value.message
    assert "wrong-one" not in refused.value.message


def test_where_no_broker_is_that_is_said(tmp_path: Path) -> None:
    with brokers.running("mosquitto", tmp_path) as broker:
        pass
    with pytest.raises(UserError, match=f"no MQTT broker answers at mqtt://127.0.0.1:{broker.address.port}"):
        asyncio.run(_open(broker))


def test_where_no_broker_can_be_that_is_said_too() -> None:
    async def main() -> None:
        async with open_bus(Address(host="a..b", port=1883), "refused", Path("/nonexistent"), MonotonicClock()):
            raise AssertionError("it was let in")

    with pytest.raises(UserError, match=r"no MQTT broker answers at mqtt://a\.\.b:1883"):
        asyncio.run(asyncio.wait_for(main(), 10))
