"""Weight images on a disk that is full, or that changes what it was given: every answer is whole all the same."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from aegis.core.model import IMAGE_EXTENT_BYTES
from tests import checkpoints, weight_images
from tests.faults.figures import Figures, noticed_s
from tests.faults.pool import ENVIRONMENT, MARKET_OPTIONS
from tests.faults.trial import nothing, undergo
from tests.live.cases import Case
from tests.live.market import MARKET
from tests.live.server import Server, launched

pytestmark = pytest.mark.long

IMAGES = 3
"""How many of the market's images the model cache holds; each is two extents. The others are read from disk."""

DISK = "64m"


@dataclass(frozen=True, slots=True)
class Served:
    server: Server
    cache: Path


@contextmanager
def _small_disk(directory: Path) -> Iterator[None]:
    """The directory as a file system of its own, where that can be had."""
    directory.mkdir(parents=True)
    if os.getuid():
        yield
        return
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", directory], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", directory], check=True)


@contextmanager
def _serving(directory: Path, cache: Path, checkpoints_dir: Path) -> Iterator[Served]:
    options = ["--models", str(checkpoints_dir), "--device-memory", "24MiB", "--mixed", "2", *MARKET_OPTIONS]
    options += ["--model-cache", f"{IMAGES * 2 * IMAGE_EXTENT_BYTES}"]
    with launched(directory, cache, *options, environment=ENVIRONMENT) as server:
        server.wait_for_ready()
        yield Served(server, cache)
        server.wait_for_freed_memory()
        assert "Traceback" not in server.output()


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory, cache: Path, specs: object, checkpoints_dir: Path
) -> Iterator[Served]:
    """All images are on its disk already."""
    directory = tmp_path_factory.mktemp("images")
    with _small_disk(directory / "cache"):
        shutil.copytree(cache, directory / "cache", dirs_exist_ok=True)
        with _serving(directory / "server", directory / "cache", checkpoints_dir) as running:
            yield running


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a small disk")
def test_the_disk_is_full(
    tmp_path: Path, served: Served, some_cases: Sequence[Case], moment: float, figures: Figures
) -> None:
    """Nothing is registered any more, and that is said; what is served goes on. It comes first: a damaged image could
    not be made again."""
    seed = 9 + round(moment * 1000)  # no image of it is there yet
    ninth = checkpoints.write(tmp_path / "ninth", "llama", tokenizer=True, seed=seed, **MARKET["llama"])
    before, filling = _files(served.cache), served.cache / "filling"
    replies: list[httpx.Response] = []

    async def strike() -> None:
        await asyncio.to_thread(_fill, filling)
        replies.append(await asyncio.to_thread(served.server.post, "/models/load", {"source": str(ninth)}))

    trial = undergo(served.server, some_cases, moment, strike)
    trial.verify()
    assert not trial.broken
    figures.add("fill the disk", trial)
    (reply,) = replies
    assert reply.is_client_error and "No space left on device" in reply.json()["error"]["message"]
    filling.unlink()
    assert _files(served.cache) == before
    assert served.server.post("/models/load", {"source": str(ninth)}).status_code == httpx.codes.OK
    assert served.server.post("/models/unload", {"model": "ninth"}).status_code == httpx.codes.OK


def _files(cache: Path) -> list[Path]:
    return [path for path in sorted(cache.rglob("*")) if path.suffix != ".lock"]


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError:
            return


def _damage(cache: Path) -> None:
    """A bit in the middle of every image."""
    for image in sorted((cache / "images").glob("*/image.bin")):
        weight_images.damage_file(image, image.stat().st_size // 2)


def test_all_change_while_they_are_served(
    served: Served, some_cases: Sequence[Case], moment: float, figures: Figures
) -> None:
    async def strike() -> None:
        await asyncio.to_thread(_damage, served.cache)

    trial = undergo(served.server, some_cases, moment, strike)
    trial.verify()
    assert not trial.broken
    figures.add("damage all images", trial, detection_s=noticed_s(trial, "weight image is made again"))


@pytest.mark.long
def test_all_have_changed_before(
    tmp_path: Path, cache: Path, specs: object, checkpoints_dir: Path, some_cases: Sequence[Case], figures: Figures
) -> None:
    own = shutil.copytree(cache, tmp_path / "cache")
    _damage(own)
    with _serving(tmp_path / "server", own, checkpoints_dir) as served:
        trial = undergo(served.server, some_cases, 0.0, nothing)
        trial.verify()
        figures.add("damage all images at rest", trial)
