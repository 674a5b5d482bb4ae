"""The embedded broker comes back whatever ends it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from aegis.config.mqtt_address import Address
from aegis.control.embedded_broker import embedded_broker


async def answers(address: Address) -> bool:
    try:
        _, writer = await asyncio.open_unix_connection(address.path)
    except OSError:
        return False
    writer.close()
    return True


def test_it_is_started_again_after_a_start_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        with monkeypatch.context() as broken:
            broken.setattr(sys, "executable", str(tmp_path / "missing"))
            started = embedded_broker(tmp_path)
            address = await started.__aenter__()
            broken.setattr("aegis.control.embedded_broker._PAUSE_S", 0.01)
            async with asyncio.timeout(30):
                while "broker cannot be started" not in caplog.messages:
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)
        async with asyncio.timeout(30):
            while not await answers(address):
                await asyncio.sleep(0.01)
        await started.__aexit__(None, None, None)
        assert not await answers(address)

    asyncio.run(main())
    assert caplog.messages.count("broker cannot be started") == 1, "however often it was tried"
