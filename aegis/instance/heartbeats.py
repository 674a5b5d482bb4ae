"""An instance on the bus: one thread beside its main loop that says how it is."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import platform
import threading
from typing import Any

from msgspec.structs import replace

from aegis.control.connection import Connection
from aegis.control.failure_detector import HEARTBEAT_NS
from aegis.control.messages import PROTOCOL, Heartbeat, InstanceState, Phase
from aegis.control.progress import LoopProgress, Progress
from aegis.control.settings import BusSettings
from aegis.control.topics import Topics
from aegis.core.clock import NS_PER_S
from aegis.core.errors import UserError
from aegis.core.ids import InstanceId
from aegis.core.role import Role
from aegis.telemetry.logs import log

_SAID_AGAIN = 20  # heartbeats: the broker may publish the will of an earlier incarnation late
_CLOSING_S = 2.0
_logger = logging.getLogger(__name__)


class HeartbeatAgent:
    """Runs from `start` to `close`. Raises UserError if the launcher is of another version."""

    def __init__(
        self, settings: BusSettings, loop_progress: LoopProgress, *, instance: InstanceId, incarnation: int, role: Role
    ) -> None:
        if settings.protocol != PROTOCOL:
            raise UserError(
                f"the launcher speaks protocol {settings.protocol}, this instance {PROTOCOL}; install the same version "
                "of aegis everywhere"
            )
        self._settings = settings
        self._loop_progress = loop_progress
        self._topics = Topics(settings.prefix)
        self._progress = Progress(loop_progress)
        self._state = InstanceState(
            cluster=settings.cluster,
            instance=instance,
            incarnation=incarnation,
            phase=Phase.STARTING,
            role=role,
            node=platform.node(),
            pid=os.getpid(),
        )
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="bus", daemon=True)
        self._started = threading.Event()
        self._stopping = False
        self._unsaid = True  # a new connection publishes its state

    def start(self) -> None:
        self._thread.start()
        self._started.wait()

    def close(self) -> None:
        """Says that it has stopped, if the broker is there."""
        with contextlib.suppress(RuntimeError):  # the loop is closed where a failure has ended the thread
            self._loop.call_soon_threadsafe(self._stop)
        self._thread.join(_CLOSING_S)

    # --- the thread ---------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        self._loop, self._wake = asyncio.get_running_loop(), asyncio.Event()
        self._loop.set_exception_handler(_log_exception)
        self._started.set()
        state = self._state
        connection = Connection(
            self._settings.address,
            name=f"{self._settings.cluster}-{state.instance}-{state.incarnation}",
            subscriptions=(),
            on_message=lambda _topic, _payload: None,
            on_up=self._connected,
            will=(self._topics.state(state.instance), replace(state, phase=Phase.LOST)),
            log_level=logging.DEBUG,  # the launcher tells it
        )
        connection.keep()
        number = 0
        while not self._stopping:
            number += 1
            if self._renew() or self._unsaid or number % _SAID_AGAIN == 0:
                self._unsaid = not await self._publish_state(connection)
            if self._loop_progress.up:
                await self._publish_heartbeat(connection, number)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_NS / NS_PER_S):
                    await self._wake.wait()
            self._wake.clear()
        self._state = replace(self._state, phase=Phase.STOPPED, running_model=None, resident=(), queued=0, running=0)
        await self._publish_state(connection)
        await connection.close()

    def _connected(self) -> None:
        self._unsaid = True
        self._wake.set()

    def _stop(self) -> None:
        self._stopping = True
        self._wake.set()

    def _renew(self) -> bool:
        """Whether the state has changed since it was last looked at."""
        before, report = self._state, self._loop_progress.report
        if self._loop_progress.up:
            self._state = replace(before, phase=Phase.UP)
        if report:
            self._state = replace(
                self._state,
                running_model=report.running_model,
                resident=report.resident,
                queued=report.queued,
                running=report.running,
            )
        return self._state != before

    async def _publish_state(self, connection: Connection) -> bool:
        return await connection.publish(self._topics.state(self._state.instance), self._state, qos=1, retain=True)

    async def _publish_heartbeat(self, connection: Connection, number: int) -> None:
        state = self._state
        heartbeat = Heartbeat(
            cluster=state.cluster,
            instance=state.instance,
            incarnation=state.incarnation,
            number=number,
            progress=self._progress.now(),
            lanes_ns=self._progress.lanes_ns(),
        )
        await connection.publish(self._topics.heartbeat(state.instance), heartbeat)


def _log_exception(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """The library may still ask for a socket that has just been closed; it connects again, so nobody has to know."""
    error = context.get("exception")
    closed = isinstance(error, OSError) and error.errno == errno.EBADF
    level = logging.DEBUG if closed else logging.WARNING
    log(_logger, level, "callback failed", {"why": repr(error or context["message"])})
