"""The main loop of an instance, with a real core, device, engine and wire: when it answers whether it lives."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from pathlib import Path

from aegis.control.progress import LoopProgress
from aegis.core.ids import InstanceId
from aegis.core.messages import Ping, Pong, Ready, Shutdown
from aegis.core.role import Role
from aegis.instance.parts import InstanceParts, poll
from aegis.instance.process import Instance as MainLoop
from aegis.process.clock import MonotonicClock
from aegis.transport.links import Hub, NodeMessage
from tests.unit.instance.test_executor import Instance

WHO = "prefill-0/1"


def test_an_instance_one_of_whose_lanes_hangs_does_not_say_that_it_lives(tmp_path: Path) -> None:
    async def main() -> list[object]:
        hub: Hub[NodeMessage] = Hub(f"ipc://{tmp_path}/node", NodeMessage)
        made, progress, told = Instance(hub.address), LoopProgress(), list[object]()
        parts = InstanceParts(
            instance=InstanceId("prefill-0"),
            role=Role.PREFILL,
            core=made.core,
            engine=made.engine,
            device=made.device,
            images=made.images,
            memory_executor=made.memory_executor,
            link=made.link,
            clock=MonotonicClock(),
            pause=poll,
        )
        loop = MainLoop(parts, progress)
        serving = asyncio.create_task(asyncio.to_thread(loop.serve))

        async def until_told(message: object) -> None:
            while message not in told:
                _, messages = await hub.receive()
                told.extend(messages)

        async def asked() -> None:
            """Returns when the loop has heard it."""
            hub.send(WHO, [Ping()])
            seen = progress.passes
            while progress.passes < seen + 3:
                await asyncio.sleep(0)

        async with asyncio.timeout(60):
            await until_told(Ready(os.getpid()))
            progress.hangs = True
            await asked()
            progress.hangs = False
            hub.send(WHO, [Ping()])
            await until_told(Pong())
            hub.send(WHO, [Shutdown()])
            await serving
            with suppress(TimeoutError):
                while True:  # all that was said
                    told.extend((await asyncio.wait_for(hub.receive(), 0.5))[1])
        loop.close()
        made.close()
        hub.close()
        return told

    told = asyncio.run(main())
    assert told.count(Pong()) == 1, "of two questions"
