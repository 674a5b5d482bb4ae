"""Servers that the live tests share: starting one costs seconds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from tests import brokers
from tests.live import market, zoo
from tests.live.server import SPLIT, Server, launched
from tests.redis_server import redis_server

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def server(
    tmp_path_factory: pytest.TempPathFactory, cache: Path, checkpoints_dir: Path, tight_memory: str
) -> Iterator[Server]:
    """Serves the market in memory for two of its models, the accounting laws checked. With so little time to a first
    token turns are short, so that models are switched often on a slow machine too. In a Ray cluster prefill is on one
    node and decode on the other, and the tests are beside the server, on the first."""
    options = ["--models", str(checkpoints_dir), "--dtype", "float32", "--device-memory", tight_memory]
    options += ["--slo", "ttft=1,tbt=0.1", "--engine", market.ENGINE]
    options += ["--tensor-parallel-size", str(market.RANKS)]
    options += ["--proxies", str(market.PROXIES), *SPLIT]
    directory = tmp_path_factory.mktemp("server")
    environment: Mapping[str, str] = {}
    with ExitStack() as stack:
        if market.RAY:
            from tests.ray_cluster import of_ray, ray_cluster

            cluster = stack.enter_context(ray_cluster())
            stack.enter_context(cluster.nodes[0].inside())
            options += ["--ray", cluster.address]
            environment = of_ray(cluster)
        if market.EXTERNAL:
            redis = stack.enter_context(redis_server("redis-server", directory))
            broker = stack.enter_context(brokers.running("mosquitto", directory / "broker"))
            options += ["--redis", redis.url, "--mqtt", broker.url]
        running = stack.enter_context(launched(directory, cache, *options, "--debug-memory", environment=environment))
        running.wait_for_ready()
        yield running


@pytest.fixture(scope="session")
def zoo_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("zoo")
    zoo.write(directory)
    return directory


@pytest.fixture(scope="session")
def zoo_server(tmp_path_factory: pytest.TempPathFactory, cache: Path, zoo_dir: Path) -> Iterator[Server]:
    """Serves many architectures in very little memory, the accounting laws checked; its instances get killed."""
    options = ["--models", str(zoo_dir), "--dtype", "float32", *zoo.MEMORY, *SPLIT]
    with launched(tmp_path_factory.mktemp("zoo-server"), cache, *options, "--debug-memory") as running:
        running.wait_for_ready()
        yield running


@pytest.fixture(autouse=True)
def _nothing_is_held_afterwards(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test on the shared server, its memory is free again."""
    yield
    if "server" in request.fixturenames:
        request.getfixturevalue("server").wait_for_freed_memory()
