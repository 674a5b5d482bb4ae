"""Servers that the live tests share: starting one costs seconds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from aegis.core.model import ModelSpec
from tests import brokers
from tests.live import market, zoo
from tests.live.roomy import DEVICE_MIB, FLOOR_MIB, Services
from tests.live.server import SPLIT, Server, launched
from tests.market_fixtures import made_once
from tests.redis_server import external_kind, redis_server
from tests.shared_servers import shared

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
    roles = ["--mixed", "1", "--policy", market.LANES] if market.LANES else SPLIT
    options += ["--proxies", str(market.PROXIES), *roles, *market.PIECES]
    directory = tmp_path_factory.mktemp("server")
    environment: Mapping[str, str] = {}
    with shared("server", __file__) as stack:
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
    return made_once(tmp_path_factory, "zoo", zoo.write)


@pytest.fixture(scope="session")
def zoo_server(tmp_path_factory: pytest.TempPathFactory, cache: Path, zoo_dir: Path) -> Iterator[Server]:
    """Serves many architectures in very little memory, the accounting laws checked. Its Redis is a user's own."""
    directory = tmp_path_factory.mktemp("zoo-server")
    options = ["--models", str(zoo_dir), "--dtype", "float32", *zoo.MEMORY, *SPLIT, *market.PIECES, "--debug-memory"]
    with shared("zoo_server", __file__) as stack:
        redis = stack.enter_context(redis_server(external_kind(), directory))
        running = stack.enter_context(launched(directory, cache, *options, "--redis", redis.url))
        running.wait_for_ready()
        yield running


@pytest.fixture(scope="session")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    directory = tmp_path_factory.mktemp("services")
    with (
        redis_server(external_kind(), directory) as redis,
        brokers.running(brokers.external_kind(), directory / "broker") as broker,
    ):
        yield Services(redis, broker)


@pytest.fixture(scope="session")
def roomy(
    tmp_path_factory: pytest.TempPathFactory,
    cache: Path,
    checkpoints_dir: Path,
    specs: list[ModelSpec],
    services: Services,
) -> Iterator[Server]:
    """Its device holds all of the market, and only who is asked to gives memory back. It uses `services`."""
    options = ["--models", str(checkpoints_dir), "--dtype", "float32", "--device-memory", f"{DEVICE_MIB}MiB"]
    options += [*SPLIT, "--redis", services.redis.url, "--mqtt", services.broker.url, "--debug-memory"]
    kept = {"AEGIS_MEMORY_FLOOR": f"{FLOOR_MIB}MiB", "AEGIS_MEMORY_IDLE_S": "86400"}
    directory = tmp_path_factory.mktemp("roomy")
    with shared("roomy", __file__) as stack:
        running = stack.enter_context(launched(directory, cache, *options, environment=kept))
        running.wait_for_ready()
        yield running


@pytest.fixture(autouse=True)
def _nothing_is_held_afterwards(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test on the shared server, its memory is free again."""
    yield
    if "server" in request.fixturenames:
        request.getfixturevalue("server").wait_for_freed_memory()
