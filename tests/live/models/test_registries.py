"""A market whose weights are nowhere on this machine: they come from a hub, a web server and a bucket."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.bucket_server import bucket
from tests.checkpoint_server import CheckpointServer, serving
from tests.live.market import Reference
from tests.live.server import Server, eventually, launched, processes_of

PROMPT = [9, 8, 7, 6, 5]
GREEDY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
MEMORY = ("--dtype", "float32", "--device-memory", "64MiB", "--debug-memory", "--mixed", "1", "--lanes", "off")
SHARD = "model.safetensors"
ROUNDS = 8


@pytest.fixture
def web(tmp_path: Path, checkpoints_dir: Path) -> Iterator[CheckpointServer]:
    for name in ("llama", "qwen2", "qwen3"):
        shutil.copytree(checkpoints_dir / name, tmp_path / "web" / "org" / name)
    with serving(tmp_path / "web") as server:
        yield server


def environment(web: CheckpointServer) -> dict[str, str]:
    return {"HF_ENDPOINT": web.url, "HF_HUB_OFFLINE": "0"}


def complete(server: Server, model: str) -> list[int]:
    reply = server.post("/v1/completions", GREEDY | {"model": model, "return_token_ids": True})
    assert reply.status_code == 200, reply.text
    tokens: list[int] = reply.json()["choices"][0]["token_ids"]
    return tokens


def expected(references: dict[str, Reference], model: str) -> list[int]:
    return references[model].greedy(PROMPT, max_tokens=20, ignore_eos=True).tokens


def states(server: Server) -> dict[str, str]:
    listed = server.get("/v1/models").json()
    return {card["id"]: card["state"] for card in listed["data"] + listed["coming"]}


def times_fetched(web: CheckpointServer, model: str) -> int:
    return len([asked for asked in web.asked_for(SHARD) if f"/{model}/" in asked.path])


def write_config(file: Path, models: dict[str, dict[str, Any]]) -> str:
    file.write_text(json.dumps({"models": models}))
    return str(file)


def test_lazy_models_come_with_their_first_request_and_leave_a_full_disk(
    tmp_path: Path, web: CheckpointServer, references: dict[str, Reference]
) -> None:
    """The cache holds one of the two lazy models, fetched and as an image."""
    config = write_config(
        tmp_path / "aegis.yaml",
        {
            "llama": {"url": "hf://org/llama@v1", "lazy": True},
            "qwen2": {"url": f"{web.url}/org/qwen2", "lazy": True},
        },
    )
    cache = tmp_path / "cache"
    options = [config, *MEMORY, "--proxies", "2", "--cache-size", "10MiB", "--host-memory", "32MiB"]
    options += ["--model-cache", "4MiB"]
    with launched(tmp_path / "server", cache, *options, environment=environment(web)) as server:
        server.wait_for_ready()
        assert states(server) == {"llama": "lazy", "qwen2": "lazy"}
        assert not web.asked_for(SHARD), "the configuration is read at once, the weights are not"
        comments: list[str] = []
        body = GREEDY | {"model": "llama", "stream": True, "return_token_ids": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120.0) as stream:
            comments += [line for line in stream.iter_lines() if line.startswith(": ")]
        assert any("is being registered: " in comment for comment in comments), comments
        assert complete(server, "llama") == expected(references, "llama")
        assert states(server) == {"llama": "ready", "qwen2": "lazy"}
        for _ in range(ROUNDS):  # one leaves the disk for the other, where a server does not hold it still
            for model in ("qwen2", "llama"):
                server.post("/models/evict", {"model": model}) if states(server)[model] == "ready" else None
                assert complete(server, model) == expected(references, model)
            if all(times_fetched(web, model) > 1 for model in ("llama", "qwen2")):
                break
        else:
            pytest.fail("fetched once only")
        images = [path for path in (cache / "images").iterdir() if not path.name.startswith(".")]
        assert sum(f.stat().st_size for path in images for f in path.iterdir()) <= 10 << 20
        server.wait_for_freed_memory()


@pytest.mark.long
def test_a_server_killed_in_the_middle_of_a_fetch_goes_on_from_there(
    tmp_path: Path, web: CheckpointServer, references: dict[str, Reference]
) -> None:
    size = (web.root / "org" / "llama" / SHARD).stat().st_size
    cache = tmp_path / "cache"
    options = ["--models", "hf://org/llama", *MEMORY]
    web.bytes_per_s = 1e6
    with launched(tmp_path / "first", cache, *options, environment=environment(web)) as server:
        eventually(lambda: any(asked.sent_bytes > size / 2 for asked in web.asked_for(SHARD)), "half of it came")
        for pid in processes_of(server.process.pid):
            os.kill(pid, signal.SIGKILL)
        server.process.wait()
        shutil.rmtree(server.scratch)
        server.scratch.mkdir()
    web.bytes_per_s = float("inf")
    with launched(tmp_path / "second", cache, *options, environment=environment(web)) as server:
        server.wait_for_ready()
        assert complete(server, "org/llama") == expected(references, "llama")
    last = web.asked_for(SHARD)[-1]
    assert last.start > size / 3 and last.start + last.sent_bytes == size


@pytest.mark.long
def test_what_goes_wrong_is_one_line_and_the_others_are_served(
    tmp_path: Path, web: CheckpointServer, references: dict[str, Reference]
) -> None:
    options = ["--models", f"{web.url}/org/qwen2", *MEMORY, "--cache-size", "12MiB", "--proxies", "2"]
    with launched(tmp_path / "server", tmp_path / "cache", *options, environment=environment(web)) as server:
        server.wait_for_ready()

        def refused(source: str, **more: Any) -> str:
            reply = server.post("/models/load", {"source": source, "name": "new", **more})
            told: str = reply.json()["error"]["message"]
            assert reply.is_error and "\n" not in told
            assert states(server) == {"qwen2": "ready"}
            assert complete(server, "qwen2") == expected(references, "qwen2")
            return told

        web.wrong.add(SHARD)
        assert "has the sha256" in refused("hf://org/llama")
        web.wrong.clear()
        web.away = True
        assert "try again later" in refused("hf://org/qwen3")
        web.away = False
        assert "no such model" in refused("hf://org/none", lazy=True)
        assert "raise --cache-size" in refused(_large(web))
        reply = server.post("/models/load", {"source": "hf://org/llama", "name": "late", "lazy": True})
        assert (reply.status_code, reply.json()["state"]) == (200, "lazy")
        web.away = True
        with ThreadPoolExecutor() as threads:
            asked = threads.submit(server.post, "/v1/completions", GREEDY | {"model": "late"})
            assert complete(server, "qwen2") == expected(references, "qwen2")
            reply = asked.result()
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "model_not_fetched"), reply.text
        web.away = False
        assert complete(server, "late") == expected(references, "llama")
        assert server.post("/models/unload", {"model": "late"}).status_code == 200
        assert states(server) == {"qwen2": "ready"}


def _large(web: CheckpointServer) -> str:
    directory = web.root / "org" / "large"
    shutil.copytree(web.root / "org" / "llama", directory)
    with (directory / SHARD).open("ab") as file:
        file.truncate(7 << 20)
    return f"{web.url}/org/large"


@pytest.mark.long
def test_a_market_in_a_bucket(tmp_path: Path, checkpoints_dir: Path, references: dict[str, Reference]) -> None:
    with bucket() as served:
        for file in (checkpoints_dir / "llama").iterdir():
            served.put(f"team/llama/{file.name}", file.read_bytes())
        options = ["--models", "s3://models/team/llama", *MEMORY]
        with launched(tmp_path / "server", tmp_path / "cache", *options, environment=served.environment) as server:
            server.wait_for_ready()
            assert complete(server, "llama") == expected(references, "llama")
            reply = server.post("/models/load", {"source": "s3://models/none", "name": "new"})
            assert reply.is_error and "there is nothing under none/" in reply.json()["error"]["message"]
            assert served.environment["AWS_SECRET_ACCESS_KEY"] not in server.output()
