"""Models registered from elsewhere: once fetched, found again, looked at only, gone from the disk and back."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from aegis.core.errors import ModelRefused
from aegis.core.ids import ModelId
from aegis.core.model import ModelSpec
from aegis.models.disk_cache import DiskCache, Hold
from aegis.models.sources import Source, read_sources
from tests import checkpoints
from tests.checkpoint_server import CheckpointServer, serving
from tests.registering import register

SHARD = "model.safetensors"


@pytest.fixture
def web(tmp_path: Path) -> Iterator[CheckpointServer]:
    for seed, name in enumerate(("one", "two")):
        checkpoints.write(tmp_path / "web" / name, "llama", seed=seed)
    with serving(tmp_path / "web") as server:
        yield server


def registered(web: CheckpointServer, cache: Path, name: str, **how: object) -> ModelSpec | None:
    (source,) = read_sources([f"{web.url}/{name}"])
    return register(source, dtype="float32", cache_dir=cache, **how)  # type: ignore[arg-type]


@pytest.fixture
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aegis.models.remote.http._FIRST_WAIT_S", 0.001)


@pytest.mark.parametrize("etags", [True, False])
def test_its_image_is_found_again_without_the_weights_and_without_the_source(
    tmp_path: Path, web: CheckpointServer, no_waits: None, etags: bool
) -> None:
    web.etags = etags
    register_one = partial(registered, web, tmp_path / "cache", "one")
    assert register_one(looks=True) is None and not web.asked_for(SHARD)
    spec = register_one()
    assert spec and (register_one(looks=True) == spec) is etags, (
        "without a tag nobody knows whether it is the same still"
    )
    for weights in (tmp_path / "cache" / "checkpoints").rglob("*.safetensors"):
        weights.unlink()
    asked = len(web.asked_for(SHARD))
    web.away = True
    if etags:
        assert register_one() == spec
    else:
        with pytest.raises(ModelRefused):
            register_one()
    web.away = False
    assert len(web.asked_for(SHARD)) == asked
    again = register_one(renew=True)
    assert again and again.manifest == spec.manifest, "fetched again it is the same"
    assert len(web.asked_for(SHARD)) == asked + 1


def test_what_is_longest_unused_leaves_for_another_and_is_fetched_again(tmp_path: Path, web: CheckpointServer) -> None:
    cache, size = tmp_path / "cache", (web.root / "one" / SHARD).stat().st_size
    register_within = partial(registered, web, cache, disk_bytes=5 * size // 2)
    first = register_within("one")
    second = register_within("two")
    assert first and second and first.directory != second.directory
    assert not Path(first.directory).exists() and Path(second.directory).exists()
    assert sum(entry.nbytes for entry in DiskCache(cache, None).entries()) <= 5 * size // 2
    assert register_within("one") == first
    assert len([asked for asked in web.asked_for(SHARD) if "/one/" in asked.path]) == 2
    holding = Hold(Path(first.directory))
    with pytest.raises(ModelRefused, match="may not leave; raise --cache-size"):
        register_within("two")
    holding.release()
    assert register_within("two") == second


def test_what_was_fetched_does_not_leave_for_others_while_it_is_converted(
    tmp_path: Path, web: CheckpointServer
) -> None:
    cache, size = tmp_path / "cache", (web.root / "one" / SHARD).stat().st_size
    there: list[bool] = []

    def check(spec: ModelSpec, model: object) -> None:
        with pytest.raises(ModelRefused, match="may not leave"), DiskCache(cache, 2 * size).room(2 * size):
            pass
        there.extend(path.exists() for path in (cache / "checkpoints").glob(f"*/files/{SHARD}"))

    assert registered(web, cache, "one", check=check) and there == [True]
    with DiskCache(cache, 2 * size).room(2 * size):
        assert not list((cache / "checkpoints").glob(f"*/files/{SHARD}")), "it may leave afterwards"


def test_a_lazy_directory_is_looked_at_alone(tmp_path: Path, web: CheckpointServer) -> None:
    (source,) = read_sources([str(web.root / "one")])
    how = {"dtype": "float32", "cache_dir": tmp_path / "cache"}
    assert register(source, looks=True, **how) is None  # type: ignore[arg-type]
    spec = register(source, **how)  # type: ignore[arg-type]
    assert spec and register(source, looks=True, **how) == spec  # type: ignore[arg-type]
    shutil.rmtree(web.root / "one")
    with pytest.raises(ModelRefused, match="no such directory"):
        register(source, looks=True, **how)  # type: ignore[arg-type]


def test_a_lazy_model_of_the_hub_is_looked_at_alone(
    tmp_path: Path, web: CheckpointServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", web.url)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    source = Source(ModelId("one"), hub="one", lazy=True)
    assert register(source, dtype="float32", cache_dir=tmp_path / "cache", looks=True) is None
    assert web.asked_for("config.json") and not web.asked_for(SHARD)
