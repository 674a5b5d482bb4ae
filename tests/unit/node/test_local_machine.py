"""What a machine has is closed with it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

from aegis.node.local_machine import LocalMachine


def _host_kv() -> int:
    return sum("aegis-kv" in str(fd.resolve()) for fd in Path("/proc/self/fd").iterdir())


def test_host_kv_of_a_machine_that_is_closed_is_given_back() -> None:
    async def main() -> None:
        before = _host_kv()
        machine = LocalMachine(
            host_kv_bytes=1 << 20,
            cache_bytes=0,
            ranks=2,
            instances=1,
            rendezvous="",
            fork_server=cast(Any, None),
        )
        assert _host_kv() == before + 2
        machine.close()
        assert _host_kv() == before

    asyncio.run(main())
