"""`aegis top` before a server that works."""

from __future__ import annotations

import asyncio

from textual.widgets import DataTable

from aegis.admin_client import AdminClient
from aegis.cli.top.app import Top
from tests.live.market import MARKET
from tests.live.server import WAIT_S, Server


def test_what_runs_is_shown(server: Server) -> None:
    async def main() -> None:
        app = Top(AdminClient(server.url), server.url, 0.2)
        async with app.run_test(size=(120, 40)) as pilot, asyncio.timeout(WAIT_S):
            body = {"model": "llama", "prompt": [5, 6, 7], "max_tokens": 32, "ignore_eos": True}
            asked = asyncio.create_task(asyncio.to_thread(server.post, "/v1/completions", body))
            models, instances = app.query_one("#models", DataTable), app.query_one("#instances", DataTable)
            while models.row_count < len(MARKET) or "llama" not in str(instances.get_cell("decode-0", "model")):
                await pilot.pause(0.05)
            assert (await asked).is_success
            assert {str(key.value) for key in instances.rows} == {"prefill-0", "decode-0"}

    asyncio.run(main())
