"""A model cache too small for the market: everybody is served, images come and go, and a damaged one is made again."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from aegis.core.model import IMAGE_EXTENT_BYTES, ModelSpec
from tests import checkpoints, weight_images
from tests.live.market import MARKET, Reference
from tests.live.server import Server, eventually, launched
from tests.live.streams import Body, Stream, client_of, run_all

PROMPT = [9, 8, 7, 6, 5]
TOKENS = 24
GREEDY: Body = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
IMAGES = 3
"""How many of the market's images the cache holds: each is two extents."""


@pytest.fixture(scope="module")
def small_server(
    tmp_path_factory: pytest.TempPathFactory, cache: Path, checkpoints_dir: Path, tight_memory: str, specs: object
) -> Iterator[Server]:
    options = ["--models", str(checkpoints_dir), "--dtype", "float32", "--device-memory", tight_memory]
    options += ["--model-cache", f"{IMAGES * 2 * IMAGE_EXTENT_BYTES}", "--debug-memory"]
    with launched(tmp_path_factory.mktemp("small"), cache, *options) as running:
        running.wait_for_ready()
        yield running


def extents(server: Server, state: str) -> int:
    return server.metrics().total("model_cache_bytes", state=state) // IMAGE_EXTENT_BYTES


def uncached(server: Server, directory: Path, seed: int, cache: Path) -> tuple[Path, Path]:
    """Adds a model as large as those of the market to a full cache; its checkpoint, and its image on disk."""
    for name in MARKET:
        _complete(server, name)
    eventually(lambda: extents(server, "cached") == 2 * IMAGES, "the cache is full")
    checkpoint = checkpoints.write(directory, "llama", tokenizer=True, seed=seed, **MARKET["llama"])
    assert server.post("/models/load", {"source": str(checkpoint)}).status_code == httpx.codes.OK
    images = [entry for entry in (cache / "images").iterdir() if not entry.name.startswith(".")]
    newest = max(images, key=lambda image: image.stat().st_mtime_ns)
    return checkpoint, newest / "image.bin"


def serve_in_turns(server: Server, names: Sequence[str], rounds: int) -> list[Stream]:
    """One request at a time, more than a second apart for each model, so that each counts as a use."""
    streams: list[Stream] = []

    async def main() -> None:
        async with client_of(server.url) as client:
            for _ in range(rounds):
                pause = asyncio.create_task(asyncio.sleep(1.05))
                for name in names:
                    streams.append(Stream(GREEDY | {"model": name}))
                    await streams[-1].run(client)
                await pause

    asyncio.run(main())
    return streams


def test_a_market_of_which_the_cache_holds_three_is_served_whole(
    small_server: Server, specs: list[ModelSpec], references: dict[str, Reference]
) -> None:
    assert all(-(-spec.manifest.image_bytes // IMAGE_EXTENT_BYTES) == 2 for spec in specs)
    expected = {
        name: reference.greedy(PROMPT, max_tokens=TOKENS, ignore_eos=True).tokens
        for name, reference in references.items()
    }
    names = list(MARKET)
    streams = [stream for at in range(0, 8, 2) for stream in serve_in_turns(small_server, names[at : at + 2], 3)]
    streams += run_all(small_server.url, [GREEDY | {"model": name} for name in names * 3])
    assert [stream.body["model"] for stream in streams if stream.tokens != expected[stream.body["model"]]] == []
    eventually(lambda: extents(small_server, "filling") + extents(small_server, "evicting") == 0, "fills have ended")
    metrics = small_server.metrics()
    assert metrics.total("model_cache_evictions_total") >= 3
    assert metrics.total("model_cache_hits_total") > 0 and metrics.total("model_cache_misses_total") > 0
    assert metrics.total("model_cache_failed_fills_total") == 0
    cards = small_server.get("/v1/models").json()["data"]
    assert 2 * sum(card["weights"] == "cached" for card in cards) == extents(small_server, "cached") <= 2 * IMAGES
    assert {card["weights"] for card in cards} == {"cached", "disk"}
    assert metrics.total("instance_restarts_total") == 0
    small_server.wait_for_freed_memory()


@pytest.mark.parametrize("fault", ["truncated", pytest.param("changed", marks=pytest.mark.long)])
def test_requests_wait_until_an_image_damaged_on_disk_was_made_again(
    fault: str, small_server: Server, references: dict[str, Reference], cache: Path, tmp_path: Path
) -> None:
    name = f"damaged-{fault}"
    checkpoint, image = uncached(small_server, tmp_path / name, len(fault), cache)
    expected = Reference(checkpoint).greedy(PROMPT, max_tokens=TOKENS, ignore_eos=True).tokens
    if fault == "truncated":
        os.truncate(image, image.stat().st_size - 5)
    else:
        weight_images.damage_file(image, 1000)
    others = [GREEDY | {"model": other} for other in list(MARKET)[:2]] * 2
    first, *beside = run_all(small_server.url, [GREEDY | {"model": name}, *others])
    assert (first.error, first.tokens) == (None, expected)
    assert all(stream.done for stream in beside)
    assert small_server.get(f"/v1/models/{name}").json()["state"] == "ready"
    assert small_server.post("/models/unload", {"model": name}).status_code == httpx.codes.OK
    assert small_server.metrics().total("instance_restarts_total") == 0
    small_server.wait_for_freed_memory()


@pytest.mark.long
def test_a_model_whose_image_and_checkpoint_are_gone_says_so(small_server: Server, cache: Path, tmp_path: Path) -> None:
    checkpoint, image = uncached(small_server, tmp_path / "gone", 99, cache)
    image.unlink()
    (checkpoint / "config.json").unlink()
    _complete(small_server, "gone")
    state = eventually(
        lambda: (card := small_server.get("/v1/models/gone").json())["state"] == "failed" and card, "it has failed"
    )
    assert "cannot be made again" in state["detail"]
    reply = small_server.post("/v1/completions", GREEDY | {"model": "gone"})
    assert reply.status_code == httpx.codes.SERVICE_UNAVAILABLE
    assert small_server.post("/models/unload", {"model": "gone"}).status_code == httpx.codes.OK
    small_server.wait_for_freed_memory()


def _complete(server: Server, model: str) -> list[int]:
    (stream,) = run_all(server.url, [GREEDY | {"model": model}])
    return stream.tokens
