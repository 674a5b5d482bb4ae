"""The embedded broker, under clients that come and go together."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiomqtt

from tests import brokers

_TOGETHER, _EACH = 4, 100


def test_who_connects_while_others_subscribe_is_served(tmp_path: Path) -> None:
    """One of a hundred was not: amqtt goes through everybody's topics while it greets, and those changed."""

    async def come_and_go(path: str, who: int) -> None:
        for visit in range(_EACH):
            async with aiomqtt.Client(path, transport="unix", timeout=10) as client:
                await client.subscribe("kept/+", qos=1)
                await client.subscribe(f"own/{who}/{visit}", qos=1)
                assert (await anext(client.messages)).topic.value == "kept/0"

    async def main(path: str) -> None:
        async with aiomqtt.Client(path, transport="unix") as client:
            await client.publish("kept/0", b"0", qos=1, retain=True)
        async with asyncio.TaskGroup() as visitors:
            for who in range(_TOGETHER):
                visitors.create_task(come_and_go(path, who))

    with brokers.running("embedded", tmp_path) as broker:
        asyncio.run(main(broker.address.path or ""))
