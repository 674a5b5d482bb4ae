"""The main loop of an instance, with a real core, device, engine and wire: when it answers whether it lives, and
what it reports of its engines."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from pathlib import Path

from aegis.control.progress import LoopProgress
from aegis.core.ids import InstanceId
from aegis.core.messages import Ping, Pong, Ready, Shutdown, Telemetry
from aegis.core.role import Role
from aegis.instance.parts import InstanceParts, poll
from aegis.instance.process import Instance as MainLoop
from aegis.process.clock import MonotonicClock
from aegis.transport.links import Hub, NodeMessage
from tests.unit.instance.test_executor import Instance

WHO = "prefill-0/1"


class Serving:
    """An instance in a thread, and the node that it tells everything to."""

    def __init__(self, directory: Path, *, initialisations: int = 1) -> None:
        self._hub: Hub[NodeMessage] = Hub(f"ipc://{directory}/node", NodeMessage)
        self._made, self.progress, self.told = Instance(self._hub.address), LoopProgress(), list[object]()
        made = self._made
        parts = InstanceParts(
            instance=InstanceId("prefill-0"),
            role=Role.PREFILL,
            core=made.core,
            engine=made.engine,
            initialisations=lambda: initialisations,
            device=made.device,
            images=made.images,
            memory_executor=made.memory_executor,
            link=made.link,
            clock=MonotonicClock(),
            pause=poll,
        )
        self._loop = MainLoop(parts, self.progress)
        self._serving = asyncio.create_task(asyncio.to_thread(self._loop.serve))

    async def until_told(self, message: object) -> None:
        while message not in self.told:
            await self._hear()

    async def report(self) -> Telemetry:
        """The first one."""
        while not (reports := [message for message in self.told if isinstance(message, Telemetry)]):
            await self._hear()
        return reports[0]

    async def asked(self) -> None:
        """Returns when the loop has heard it."""
        self.ask()
        seen = self.progress.passes
        while self.progress.passes < seen + 3:
            await asyncio.sleep(0)

    def ask(self) -> None:
        self._hub.send(WHO, [Ping()])

    async def end(self) -> None:
        """After all that was said."""
        self._hub.send(WHO, [Shutdown()])
        await self._serving
        with suppress(TimeoutError):
            while True:
                self.told.extend((await asyncio.wait_for(self._hub.receive(), 0.5))[1])
        self._loop.close()
        self._made.close()
        self._hub.close()

    async def _hear(self) -> None:
        _, messages = await self._hub.receive()
        self.told.extend(messages)


def test_an_instance_one_of_whose_lanes_hangs_does_not_say_that_it_lives(tmp_path: Path) -> None:
    async def main() -> list[object]:
        serving = Serving(tmp_path)
        async with asyncio.timeout(60):
            await serving.until_told(Ready(os.getpid()))
            serving.progress.hangs = True
            await serving.asked()
            serving.progress.hangs = False
            serving.ask()
            await serving.until_told(Pong())
            await serving.end()
        return serving.told

    told = asyncio.run(main())
    assert told.count(Pong()) == 1, "of two questions"


def test_an_instance_reports_how_many_engines_it_has_initialised(tmp_path: Path) -> None:
    async def main() -> Telemetry:
        serving = Serving(tmp_path, initialisations=2)
        async with asyncio.timeout(60):
            report = await serving.report()
            await serving.end()
        return report

    assert asyncio.run(main()).counters["engine_initialisations_total"] == 2
