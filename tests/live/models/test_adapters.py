"""LoRA adapters are served beside their base: exact, and without moving its bytes; bad ones harm nobody."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from aegis.core.rng import Stream as Draws
from tests import adapters, checkpoints
from tests.checkpoints import VOCAB_SIZE
from tests.live.market import Greedy, Reference
from tests.live.server import SPLIT, Server, launched
from tests.live.streams import Body, run_all

MAX_TOKENS = 24
MARGIN_MIN = 3e-5
COUNT = 16
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}


class Market(NamedTuple):
    directory: Path
    references: dict[str, Reference]


@pytest.fixture(scope="module")
def market(tmp_path_factory: pytest.TempPathFactory) -> Market:
    """A base, its adapters and another model in one directory; each adapter also merged, as a model of its own."""
    root = tmp_path_factory.mktemp("adapters")
    served = root / "market"
    base = checkpoints.write(served / "base", "llama", tokenizer=True, **WIDE)
    checkpoints.write(served / "other", "qwen2", tokenizer=True)
    references = {name: Reference(served / name) for name in ("base", "other")}
    for number in range(COUNT):
        path = adapters.write(served / f"adapter-{number}", base, rank=2, targets=("q_proj", "v_proj"), seed=number)
        merged = root / "merged" / path.name
        checkpoints.write_tokenizer(merged)
        adapters.merged(base, path).save_pretrained(merged)
        references[path.name] = Reference(merged)
    return Market(served, references)


def clear_case(reference: Reference, name: str) -> tuple[list[int], Greedy]:
    """A prompt to which the answer does not hang on rounding."""
    for attempt in range(20):
        draws = Draws(0, "adapters", name, attempt)
        prompt = [draws.below(VOCAB_SIZE) for _ in range(20)]
        answer = reference.greedy(prompt, max_tokens=MAX_TOKENS)
        if answer.margin > MARGIN_MIN:
            return prompt, answer
    raise AssertionError(f"{name} answers nothing clearly")


def bytes_loaded(server: Server) -> int:
    return server.metrics().total("instance_copied_bytes_total", kind="load")


@pytest.mark.parametrize("roles", [("--mixed", "1"), SPLIT], ids=["mixed", "split"])
def test_adapters_share_their_base(market: Market, tmp_path: Path, roles: tuple[str, ...]) -> None:
    options = ("--models", str(market.directory), "--dtype", "float32", "--device-memory", "128MiB", *roles)
    with launched(tmp_path / "server", tmp_path / "cache", *options) as server:
        server.wait_for_ready()
        cards = {card["id"]: card for card in server.get("/v1/models").json()["data"]}
        assert {card["parent"] for name, card in cards.items() if name.startswith("adapter")} == {"base"}
        assert cards["base"]["parent"] is None and cards["other"]["parent"] is None
        bodies, expected = list[Body](), list[list[int]]()
        for name, reference in market.references.items():
            prompt, answer = clear_case(reference, name)
            bodies.append({"model": name, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0})
            expected.append(answer.tokens)
        for body, stream, tokens in zip(bodies, run_all(server.url, bodies), expected, strict=True):
            assert stream.tokens == tokens, body["model"]
        _moves_little(server, market)
        _comes_and_goes(server, market)
        server.wait_for_freed_memory()


def _moves_little(server: Server, market: Market) -> None:
    """From an adapter that is there to one that is not."""
    source = str(market.directory / "adapter-0")
    assert server.post("/models/load", {"source": source, "name": "late"}).json()["parent"] == "base"
    base_bytes = sum(file.stat().st_size for file in (market.directory / "base").glob("*.safetensors"))
    instances = len(server.metrics().instances())
    ask(server, "adapter-0")
    before = bytes_loaded(server)
    ask(server, "late")
    assert 0 < bytes_loaded(server) - before < 0.02 * base_bytes * instances


def _comes_and_goes(server: Server, market: Market) -> None:
    path = market.directory / "adapter-1"
    loaded = server.post("/v1/load_lora_adapter", {"lora_name": "again", "lora_path": str(path)})
    assert loaded.text == "Success: LoRA adapter 'again' added successfully."
    assert ask(server, "again") == ask(server, "adapter-1")
    taken = server.post("/v1/load_lora_adapter", {"lora_name": "again", "lora_path": str(path)})
    assert taken.status_code == 409
    refused = server.post("/models/unload", {"model": "base"})
    assert refused.status_code == 409 and "is the base of" in refused.json()["error"]["message"]
    plain = server.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": str(market.directory / "other")})
    assert plain.status_code == 400 and "it is not an adapter" in plain.json()["error"]["message"]
    wrong = server.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": str(path), "base_model_name": "other"})
    assert wrong.status_code == 400 and "which is served as 'base'" in wrong.json()["error"]["message"]
    gone = server.post("/v1/unload_lora_adapter", {"lora_name": "again"})
    assert gone.text == "Success: LoRA adapter 'again' removed successfully."
    assert server.post("/v1/completions", {"model": "again", "prompt": "a"}).status_code == 404
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "base"}).status_code == 400


def ask(server: Server, model: str) -> list[int]:
    body = {"model": model, "prompt": [5, 9, 31, 7], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answered = server.post("/v1/completions", body | {"return_token_ids": True})
    assert answered.status_code == 200, answered.text
    tokens: list[int] = answered.json()["choices"][0]["token_ids"]
    return tokens
