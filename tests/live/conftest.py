"""Checkpoints and servers that the live tests share: starting one costs seconds."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import pytest
import torch

from aegis.core.model import ModelSpec
from aegis.device.cpu_pool import PAGE_BYTES
from aegis.engine import vllm_version
from tests.live import market, zoo
from tests.live.market import Reference
from tests.live.server import SPLIT, Server, launched

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def checkpoints_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The eight models' checkpoints."""
    if market.ENGINE == "vllm" and (reason := vllm_version.refusal()):
        pytest.skip(reason)
    directory = tmp_path_factory.mktemp("market")
    market.write(directory)
    return directory


@pytest.fixture(scope="session")
def specs(checkpoints_dir: Path, cache: Path) -> list[ModelSpec]:
    registered, refused = market.register_all(checkpoints_dir, cache)
    assert not refused
    return registered


@pytest.fixture(scope="session")
def references(checkpoints_dir: Path) -> dict[str, Reference]:
    return {name: Reference(checkpoints_dir / name) for name in market.MARKET}


@pytest.fixture(scope="session")
def tight_memory(specs: list[ModelSpec]) -> str:
    """The most device memory in which no three of the models fit at once."""
    pages = sorted(-(-spec.manifest.image_bytes // PAGE_BYTES) for spec in specs)
    least_of_three = list(accumulate(pages))[2]
    assert pages[-1] + pages[-2] < least_of_three
    return f"{(least_of_three - 1) * PAGE_BYTES >> 20}MiB"


@pytest.fixture(scope="session")
def server(
    tmp_path_factory: pytest.TempPathFactory, cache: Path, checkpoints_dir: Path, tight_memory: str
) -> Iterator[Server]:
    """Serves the market in memory for two of its models, the accounting laws checked. With so little time to a first
    token turns are short, so that models are switched often on a slow machine too."""
    options = ["--models", str(checkpoints_dir), "--dtype", "float32", "--device-memory", tight_memory]
    options += ["--slo", "ttft=1,tbt=0.1", "--engine", market.ENGINE]
    options += SPLIT
    with launched(tmp_path_factory.mktemp("server"), cache, *options, "--debug-memory") as running:
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
    """Whatever a test did to the shared server, its memory is free again."""
    yield
    if "server" in request.fixturenames:
        request.getfixturevalue("server").wait_for_freed_memory()
