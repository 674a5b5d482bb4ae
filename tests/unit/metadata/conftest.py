"""Every test of the store runs against both servers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.redis_server import KINDS, RedisServer, redis_server


@pytest.fixture(params=KINDS)
def redis(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(request.param, tmp_path) as server:
        yield server
