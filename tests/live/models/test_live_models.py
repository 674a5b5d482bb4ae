"""Models change while the server runs: by its file, by command, and while requests for them wait."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests import checkpoints
from tests.live.market import Reference
from tests.live.models.test_models import aegis_models, traffic
from tests.live.server import Server, eventually, launched
from tests.live.streams import Stream, client_of, run_all, until

PROMPT = [9, 8, 7, 6, 5]
GREEDY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0, "ignore_eos": True}


class Edited:
    """A server of the file `aegis.yaml`, which a test writes anew."""

    def __init__(self, server: Server, file: Path, checkpoints_dir: Path) -> None:
        self.server = server
        self.file = file
        self.models = {name: {"path": str(checkpoints_dir / name)} for name in ("llama", "qwen2")}

    def write(self, text: str | None = None) -> None:
        self.file.write_text(json.dumps({"models": self.models}) if text is None else text)

    def card(self, name: str) -> dict[str, Any] | None:
        cards = {card["id"]: card for card in self.server.get("/v1/models").json()["data"]}
        return cards.get(name)


@pytest.fixture(scope="module")
def edited(tmp_path_factory: pytest.TempPathFactory, cache: Path, checkpoints_dir: Path) -> Iterator[Edited]:
    directory = tmp_path_factory.mktemp("edited")
    file = directory / "aegis.yaml"
    options = [str(file), "--dtype", "float32", "--device-memory", "64MiB", "--proxies", "2", "--debug-memory"]
    server = Edited(Server(None, file, file), file, checkpoints_dir)  # type: ignore[arg-type]
    server.write()
    with launched(directory / "server", cache, *options) as running:
        running.wait_for_ready()
        server.server = running
        yield server


@pytest.mark.long
def test_an_edited_file_changes_what_it_says_and_nothing_else(edited: Edited, checkpoints_dir: Path) -> None:
    """Streams of the model that is not touched run meanwhile."""
    server = edited.server

    async def main() -> None:
        async with traffic(server, [GREEDY | {"model": "llama"}] * 2) as streams:
            await until(lambda: any(stream.done for stream in streams), "streams are running")
            await asyncio.to_thread(edit)

    def edit() -> None:
        created = edited.card("llama")
        assert created
        edited.models["qwen3"] = {"path": str(checkpoints_dir / "qwen3")}
        edited.models["qwen2"] |= {"slo": {"ttft_ms": 1234}, "priority": -3, "limits": {"concurrent": 7}}
        edited.write()
        eventually(lambda: (edited.card("qwen3") or {}).get("state") == "ready", "qwen3 is there")
        changed = eventually(lambda: (c := edited.card("qwen2")) and c["priority"] == -3 and c, "qwen2 is changed")
        assert (changed["slo"]["ttft_ms"], changed["limits"]["concurrent"]) == (1234, 7)
        del edited.models["qwen3"]
        edited.write()
        eventually(lambda: edited.card("qwen3") is None, "qwen3 is gone")
        assert (edited.card("llama") or {})["created"] == created["created"]

    asyncio.run(main())
    assert server.post("/v1/completions", GREEDY | {"model": "qwen2"}).status_code == 200


def test_a_file_that_cannot_be_read_changes_nothing_and_says_why(edited: Edited) -> None:
    before = edited.server.get("/v1/models").json()["data"]
    for text, told in (("models: [", "line 1"), ("models:\n  llama:\n    pth: x\n", "line 3: models.llama.pth")):
        edited.write(text)
        eventually(lambda told=told: told in edited.server.output(), told)
    assert "the configuration stays as it was" in edited.server.output()
    assert edited.server.get("/v1/models").json()["data"] == before
    edited.write()


def test_a_model_is_changed_by_command(edited: Edited) -> None:
    server = edited.server
    for arguments, key, value in (
        (("--slo", "ttft=3,tbt=0.2"), "slo", {"ttft_ms": 3000.0, "tbt_ms": 200.0, "gap_ms": 500.0}),
        (("--priority", "4"), "priority", 4),
        (("--concurrent", "2", "--requests-per-minute", "3"), "limits", {"requests_per_minute": 3, "concurrent": 2}),
        (("--concurrent", "0"), "limits", {"requests_per_minute": 3, "concurrent": None}),
        (("--pin",), "pinned", True),
        (("--unpin",), "pinned", False),
    ):
        code, told = asyncio.run(aegis_models(server, "set", "llama", *arguments))
        assert code == 0, told
        card = edited.card("llama")
        assert card and (card[key] == value or card[key] == {"tokens_per_minute": None} | dict(value))  # type: ignore[call-overload]
    assert asyncio.run(aegis_models(server, "set", "lama", "--pin"))[0] == 1
    reply = server.post("/models/update", {"model": "llama", "limits": {"concurrent": -1}})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "limits.concurrent")
    statuses = [server.post("/v1/completions", GREEDY | {"model": "llama"}).status_code for _ in range(4)]
    assert statuses == [200] * 3 + [429]
    server.post("/models/update", {"model": "llama", "limits": {}})
    assert server.post("/v1/completions", GREEDY | {"model": "llama"}).status_code == 200


def test_an_unloaded_model_leaves_memory_and_its_next_request_brings_it_back(
    edited: Edited, references: dict[str, Reference]
) -> None:
    server = edited.server
    short, long = GREEDY | {"model": "llama"}, GREEDY | {"model": "llama", "max_tokens": 200}
    expected = references["llama"].greedy(PROMPT, max_tokens=20, ignore_eos=True).tokens

    def on_devices() -> set[str]:
        instances = [use for device in server.get("/debug/memory").json()["devices"] for use in device["instances"]]
        return {weights["model"] for use in instances for weights in use["ranges"]["weights"]}

    def unloaded() -> bool:
        return "llama" not in on_devices() and (edited.card("llama") or {})["weights"] == "disk"

    async def evicted_meanwhile(streams: Sequence[Stream]) -> None:
        await until(lambda: all(stream.tokens for stream in streams), "tokens come")
        async with client_of(server.url) as client:
            reply = await client.post("/models/evict", json={"model": "llama"})
        assert (reply.status_code, reply.json()["state"]) == (200, "ready")

    for stream in run_all(server.url, [long] * 2, evicted_meanwhile):
        assert stream.done and len(stream.tokens) == 200
    eventually(unloaded, "it has left after its requests")
    (stream,) = run_all(server.url, [short])
    assert stream.tokens == expected
    eventually(lambda: (edited.card("llama") or {})["weights"] == "cached", "it is back")
    code, told = asyncio.run(aegis_models(server, "unload", "llama"))
    assert (code, told.count("\n")) == (0, 1), told
    eventually(unloaded, "it has left at once")
    server.wait_for_freed_memory()


def test_a_pinned_model_is_not_unloaded(edited: Edited) -> None:
    server = edited.server
    server.post("/models/update", {"model": "qwen2", "pin": True})
    code, told = asyncio.run(aegis_models(server, "unload", "qwen2"))
    assert (code, told) == (1, "aegis: model 'qwen2' is pinned; unpin it first (aegis models set qwen2 --unpin)\n")
    reply = server.post("/models/evict", {"model": "qwen2"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (409, "model")
    server.post("/models/update", {"model": "qwen2", "pin": False})
    code, told = asyncio.run(aegis_models(server, "unload", "qwen"))
    assert (code, told.count("\n")) == (1, 1) and "no model 'qwen'" in told


def test_a_request_for_a_model_that_is_being_registered_is_held_and_told(edited: Edited, tmp_path: Path) -> None:
    server = edited.server
    newcomer = checkpoints.write(tmp_path / "olmo2", "olmo2", tokenizer=True)
    expected = Reference(newcomer).greedy(PROMPT, max_tokens=20, ignore_eos=True).tokens
    body = GREEDY | {"model": "olmo2", "return_token_ids": True}
    comments: list[str] = []
    events: list[str] = []

    async def watched(client: httpx.AsyncClient) -> None:
        async with client.stream("GET", "/models/sse") as stream:
            async for line in stream.aiter_lines():
                if line.startswith("data: ") and '"olmo2"' in line:
                    events.append(json.loads(line.removeprefix("data: "))["state"])
                    if events[-1] == "removed":
                        return

    async def streamed(client: httpx.AsyncClient) -> list[int]:
        tokens: list[int] = []
        async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as stream:
            assert stream.status_code == 200
            async for line in stream.aiter_lines():
                if line.startswith(":"):
                    comments.append(line)
                elif line.startswith("data: {"):
                    tokens += json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"]
        return tokens

    async def main() -> None:
        async with client_of(server.url) as client:
            watching = asyncio.create_task(watched(client))
            adding = asyncio.create_task(client.post("/models/load", json={"source": str(newcomer)}))
            told: set[str] = set()
            while len(told) < 2:  # every proxy knows
                listed = await client.get("/v1/models")
                told |= {listed.headers["x-aegis-proxy"]} if listed.json()["coming"] else set()
                assert not adding.done(), adding.result().text
            whole, *streams = await asyncio.gather(
                client.post("/v1/completions", json=body), *(streamed(client) for _ in range(4))
            )
            assert whole.json()["choices"][0]["token_ids"] == expected
            assert streams == [expected] * 4
            assert (await adding).status_code == 200
            await until(lambda: "ready" in events, "it was told")
            await client.post("/models/unload", json={"model": "olmo2"})
            await asyncio.wait_for(watching, 30)

    asyncio.run(main())
    assert any("'olmo2' is being registered: " in comment for comment in comments), comments
    assert events[0] == "registering" and events[-2:] == ["ready", "removed"]


def test_a_request_that_waited_for_a_model_that_is_refused_is_told_so(edited: Edited, tmp_path: Path) -> None:
    file = checkpoints.write(tmp_path / "cut", "llama") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    client = openai.OpenAI(base_url=edited.server.url + "/v1", api_key="none", max_retries=0)

    async def main() -> None:
        async with client_of(edited.server.url) as http:
            coming, attempts = False, 0
            while not coming:  # it may be read before anybody can ask for it
                attempts += 1
                assert attempts <= 100
                adding = asyncio.create_task(http.post("/models/load", json={"source": str(tmp_path / "cut")}))
                while not coming and not adding.done():
                    coming = bool((await http.get("/v1/models")).json()["coming"])
            with pytest.raises(openai.NotFoundError, match="no model 'cut'"):
                await asyncio.to_thread(client.completions.create, model="cut", prompt=PROMPT)
            assert (await adding).status_code == 400

    asyncio.run(main())
