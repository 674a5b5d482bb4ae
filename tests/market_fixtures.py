"""The market that tests serve: its checkpoints, its images, and what it is to answer. Made once, where a test asks for
it, also by processes that share the tests; what that needs is imported then, for most tests do without."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from aegis.models.cache import locked, replacing

if TYPE_CHECKING:
    from aegis.core.model import ModelSpec
    from tests.live.cases import Case
    from tests.live.market import Reference


def made_once(tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A directory of that name, which only the first process to come makes. Tests leave it as it is."""
    base = tmp_path_factory.getbasetemp()
    directory = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    with locked(directory):
        if not directory.exists():
            with replacing(directory) as draft:
                make(draft)
    return directory


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def checkpoints_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The eight models' checkpoints."""
    from aegis.engine.vllm import version
    from tests.live import market

    if market.ENGINE == "vllm" and (reason := version.refusal()):
        pytest.skip(reason)
    return made_once(tmp_path_factory, "market", market.write)


@pytest.fixture(scope="session")
def specs(tmp_path_factory: pytest.TempPathFactory, checkpoints_dir: Path, cache: Path) -> list[ModelSpec]:
    """Each process of tests has a cache of its own: tests damage images in it."""
    from tests.live import market

    images = made_once(tmp_path_factory, "market-cache", lambda draft: market.register_all(checkpoints_dir, draft))
    shutil.copytree(images, cache, dirs_exist_ok=True)
    registered, refused = market.register_all(checkpoints_dir, cache)
    assert not refused
    return registered


@pytest.fixture(scope="session")
def references(checkpoints_dir: Path) -> dict[str, Reference]:
    from tests.live.market import MARKET, Reference

    return {name: Reference(checkpoints_dir / name) for name in MARKET}


@pytest.fixture(scope="session")
def cases(request: pytest.FixtureRequest, checkpoints_dir: Path, references: dict[str, Reference]) -> list[Case]:
    """Takes transformers a quarter of a minute, so they are kept for the next run, as long as nothing changes that they
    depend on."""
    import msgspec

    from tests.live.cases import Case, draw_cases

    kept = request.config.cache.mkdir("cases") / f"{_identity(checkpoints_dir)}.json"  # type: ignore[union-attr]
    with locked(kept):
        if not kept.exists():
            draft = kept.with_suffix(".draft")
            draft.write_bytes(msgspec.json.encode(draw_cases(references)))
            draft.rename(kept)
    return msgspec.json.decode(kept.read_bytes(), type=list[Case])


def _identity(checkpoints_dir: Path) -> str:
    """Of the checkpoints, of the code that draws requests, and of what computes their answers."""
    import torch
    import transformers

    from tests.live import cases, market

    digest = sha256(
        f"{torch.__version__} {transformers.__version__} {torch.backends.cpu.get_cpu_capability()}".encode()
    )
    sources = [Path(str(module.__file__)) for module in (cases, market)]
    for file in (*sources, *sorted(path for path in checkpoints_dir.rglob("*") if path.is_file())):
        digest.update(f"{file.name} {file.stat().st_size}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:32]


@pytest.fixture(scope="session")
def tight_memory(specs: list[ModelSpec]) -> str:
    """The most device memory in which no three of the models fit at once."""
    from aegis.device.cpu.pool import PAGE_BYTES

    pages = sorted(-(-spec.manifest.image_bytes // PAGE_BYTES) for spec in specs)
    least_of_three = list(accumulate(pages))[2]
    assert pages[-1] + pages[-2] < least_of_three
    return f"{(least_of_three - 1) * PAGE_BYTES >> 20}MiB"
