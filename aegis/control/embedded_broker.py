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
from aegis.process.tasks import cancelled
from aegis.telemetry.logs import log

_PAUSE_S = 0.2
_logger = logging.getLogger(__name__)


@asynccontextmanager
async def embedded_broker(directory: Path) -> AsyncIterator[Address]:
    """Its socket is in the directory, which is the user's alone. It may not be there yet."""
    path = directory / "mqtt"
    keeper = asyncio.create_task(_keep(path))
    try:
        yield Address(path=str(path))
    finally:
        await cancelled(keeper)


async def _keep(path: Path) -> None:
    while True:
        path.unlink(missing_ok=True)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "aegis.control.broker_process",
            str(path),
            stdin=asyncio.subprocess.DEVNULL,
            preexec_fn=follow_launcher,
        )
        try:
            code = await process.wait()
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        log(_logger, logging.WARNING, "broker ended", {"pid": process.pid, "code": code})
        await asyncio.sleep(_PAUSE_S)
