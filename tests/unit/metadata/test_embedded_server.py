"""The embedded server is private, writes nothing to disk, comes back when it dies and never outlives its launcher."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from aegis.config.config import RedisSettings
from aegis.core.errors import UserError
from aegis.core.request import FinishReason
from aegis.metadata import embedded_server
from aegis.metadata.embedded_server import EmbeddedServer
from aegis.metadata.store import open_store
from proxy.http.market import Delta, Finished
from tests.unit.metadata.proxies import asked, read, tokens, until

LAUNCHER = """
import asyncio, sys
from pathlib import Path
from aegis.metadata.embedded_server import EmbeddedServer

async def main():
    server = EmbeddedServer(Path(sys.argv[1]))
    await server.start()
    print(server.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def alive(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_it_is_private_and_writes_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        server = EmbeddedServer(tmp_path)
        await server.start()
        mode = (tmp_path / "redis.sock").stat().st_mode
        assert stat.S_ISSOCK(mode)
        assert stat.S_IMODE(mode) == 0o700
        assert {file.name for file in tmp_path.iterdir()} <= {"redis.sock", "redis.log"}
        pid = server.pid
        await server.close()
        assert not alive(pid)
        assert not (tmp_path / "dump.rdb").exists()

    asyncio.run(main())


def test_what_keeps_it_from_coming_back_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where processes have run out for a while."""

    async def main() -> None:
        server, tries = EmbeddedServer(tmp_path), 0

        def missing() -> Path:
            nonlocal tries
            tries += 1
            return tmp_path / "missing"

        await server.start()
        with monkeypatch.context() as broken:
            broken.setattr(embedded_server, "_PAUSE_S", 0.01)
            broken.setattr(embedded_server, "get_binary_path", missing)
            os.kill(server.pid, signal.SIGKILL)
            await until(lambda: tries > 3)
        await until(lambda: alive(server.pid))
        await server.close()

    asyncio.run(main())
    ended, *why = caplog.messages
    assert ended == "the embedded Redis ended"
    assert len(why) == 1 and why[0].startswith("the embedded Redis cannot be started: ")


def test_it_comes_back_when_it_is_killed_and_calls_go_on() -> None:
    async def main() -> None:
        async with open_store(RedisSettings(wait_s=20)) as store:
            assert store.embedded
            call = await store.records.open(asked())
            os.kill(store.embedded.pid, signal.SIGKILL)
            await read(call, Delta(tokens(1, 2)), Finished(FinishReason.STOP))
            call.close()
            (await store.records.open(asked("new"))).close()
            await until(lambda: store.records.unwritten == 0)
            assert (await read(await store.records.open(asked()))).tokens == [*tokens(1, 2)]

    asyncio.run(main())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_it_ends_with_its_launcher(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-c", LAUNCHER, str(tmp_path)]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # which a shell may have it ignore
    ) as launcher:
        assert launcher.stdout
        pid = int(launcher.stdout.readline())
        assert alive(pid)
        launcher.send_signal(number)
        launcher.wait()

    async def main() -> None:
        await until(lambda: not alive(pid))

    asyncio.run(main())


def test_what_cannot_start_is_one_line(tmp_path: Path) -> None:
    async def main() -> None:
        with pytest.raises(UserError, match=r"the embedded Redis does not start: .*--redis") as caught:
            await EmbeddedServer(tmp_path / ("x" * 120)).start()
        assert "\n" not in caught.value.message

    asyncio.run(main())
