"""Many that scrape `/metrics`, which needs no key, disturb nobody."""

from __future__ import annotations

import httpx
import pytest

from tests.attacks.beside import for_seconds
from tests.attacks.harness import at_once, under_attack
from tests.live.server import WAIT_S, Server

pytestmark = pytest.mark.alone

SCRAPERS = 32
ATTACK_S = 3.0


def test_many_that_scrape_disturb_nobody(server: Server) -> None:
    def attack(_: int) -> list[int]:
        with httpx.Client(base_url=server.url, timeout=WAIT_S, trust_env=False) as client:
            return for_seconds(ATTACK_S, lambda: client.get("/metrics").status_code)

    with under_attack(server, f"{SCRAPERS} that scrape"):
        seen = at_once(attack, SCRAPERS)
    assert {status for each in seen for status in each} == {200}
