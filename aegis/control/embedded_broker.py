"""Starts the embedded broker, and starts it again when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from aegis.config.mqtt_address import Address
from aegis.process.child import follow_launcher
from aegis.process.tasks import cancelled, watched
from aegis.telemetry.logs import log

_PAUSE_S = 0.2
_logger = logging.getLogger(__name__)


@asynccontextmanager
async def embedded_broker(directory: Path) -> AsyncIterator[Address]:
    """A broker whose socket is in the directory, which is the user's alone. The socket may not be there yet."""
    path = directory / "mqtt"
    keeper = watched(_keep(path))
    try:
        yield Address(path=str(path))
    finally:
        await cancelled(keeper)


async def _keep(path: Path) -> None:
    told = ""  # the reason why it cannot be started, once for many tries
    while True:
        try:
            process = await _start(path)
        except OSError as error:  # memory or processes may have run out; there may be some later
            if str(error) != told:
                told = str(error)
                log(_logger, logging.WARNING, "broker cannot be started", {"reason": told})
        else:
            told = ""
            code = await _end_of(process)
            log(_logger, logging.WARNING, "broker ended", {"pid": process.pid, "code": code})
        await asyncio.sleep(_PAUSE_S)


async def _start(path: Path) -> asyncio.subprocess.Process:
    path.unlink(missing_ok=True)
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "aegis.control.broker_process",
        str(path),
        stdin=asyncio.subprocess.DEVNULL,
        preexec_fn=follow_launcher,
    )


async def _end_of(process: asyncio.subprocess.Process) -> int:
    """Kills it if it is cancelled."""
    try:
        return await process.wait()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
