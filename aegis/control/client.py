"""The sender of a command: one command to one instance, or to the cluster, and its reply."""

from __future__ import annotations

import asyncio
import logging
import re
from uuid import uuid4

import msgspec

from aegis.config.mqtt_address import Address
from aegis.control.connection import Connection
from aegis.control.messages import UNREADABLE, Add, ClusterOrder, Command, Order, Reply
from aegis.control.topics import CLIENT_PATTERN, CLUSTER, Topics
from aegis.core.errors import UserError
from aegis.telemetry.logs import log

_NAME = re.compile(CLIENT_PATTERN)  # a part of a topic, as a client's
_AGAIN_S = 2.0  # the broker may have been away

_logger = logging.getLogger(__name__)


async def order(address: Address, prefix: str, instance: str, command: Command | Add, *, timeout_s: float) -> Reply:
    """Raises UserError if there can be no such instance, the broker cannot be used or no answer comes."""
    if not isinstance(command, Add) and not _NAME.fullmatch(instance):
        raise UserError(f"there is no instance named {instance!r}")
    topics, client = Topics(prefix), f"ctl-{uuid4().hex[:12]}"
    number = uuid4().hex
    if isinstance(command, Add):
        assert instance == CLUSTER
        wanted: Order | ClusterOrder = ClusterOrder(id=number, client=client, command=command)
    else:
        wanted = Order(id=number, client=client, command=command)
    replies = topics.replies(instance, client)
    answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()

    def received(topic: str, payload: bytes) -> None:
        if topic != replies:  # amqtt sends a new client retained messages of others, too
            return
        try:
            reply = msgspec.json.decode(payload, type=Reply)
        except UNREADABLE as error:
            log(_logger, logging.DEBUG, "nothing that can be read", {"topic": topic, "why": str(error)})
            return
        if reply.id == wanted.id and not answer.done():
            answer.set_result(reply)

    connection = Connection(address, name=client, subscriptions=[replies], on_message=received, log_level=logging.DEBUG)
    try:
        async with asyncio.timeout(timeout_s):
            await connection.open()
            while not answer.done():  # it is done once, however often it is sent
                await connection.publish(topics.commands(instance), wanted, qos=1)
                await asyncio.wait((answer,), timeout=_AGAIN_S)
            return answer.result()
    except TimeoutError:
        whom = instance or "the cluster"
        raise UserError(
            f"no answer from {whom} within {timeout_s:g} s; is a cluster on {address} with the prefix '{prefix}'?"
        ) from None
    finally:
        await connection.close()
