"""LoRA adapters are served beside their base: exact, and without moving its bytes; bad ones harm nobody."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from transformers import AutoModelForCausalLM, PreTrainedModel

from aegis.admin_client import AdminClient, Refused
from aegis.core.rng import Stream as Draws
from tests import adapters, checkpoints
from tests.checkpoints import VOCAB_SIZE
from tests.live.greedy import ROUNDING, behind
from tests.live.server import SPLIT, Server, launched
from tests.live.streams import run_all
from tests.long_forms import first_of

MAX_TOKENS = 24
COUNT = 16
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}


class Market(NamedTuple):
    directory: Path
    models: dict[str, PreTrainedModel]


@pytest.fixture(scope="module")
def market(tmp_path_factory: pytest.TempPathFactory) -> Market:
    """A base, its adapters and another model in one directory; and each as transformers has it, adapters merged."""
    served = tmp_path_factory.mktemp("adapters") / "market"
    base = checkpoints.write(served / "base", "llama", tokenizer=True, **WIDE)
    checkpoints.write(served / "other", "qwen2", tokenizer=True)
    models = {name: AutoModelForCausalLM.from_pretrained(served / name).eval() for name in ("base", "other")}
    for number in range(COUNT):
        path = adapters.write(served / f"adapter-{number}", base, rank=2, targets=("q_proj", "v_proj"), seed=number)
        models[path.name] = adapters.merged(base, path)
    return Market(served, models)


def bytes_loaded(server: Server) -> int:
    return server.metrics().total("instance_copied_bytes_total", kind="load")


@pytest.mark.parametrize("roles", first_of(1, [SPLIT, ("--mixed", "1")]), ids=["split", "mixed"])
def test_adapters_share_their_base(market: Market, tmp_path: Path, cache: Path, roles: tuple[str, ...]) -> None:
    options = ("--models", str(market.directory), "--dtype", "float32", "--device-memory", "128MiB", *roles)
    with launched(tmp_path, cache, *options) as server:
        server.wait_for_ready()
        cards = {card["id"]: card for card in server.get("/v1/models").json()["data"]}
        assert {card["parent"] for name, card in cards.items() if name.startswith("adapter")} == {"base"}
        assert cards["base"]["parent"] is None and cards["other"]["parent"] is None
        prompts = {
            name: [Draws(0, "adapters", name, at).below(VOCAB_SIZE) for at in range(20)] for name in market.models
        }
        greedy = {"max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
        streams = run_all(server.url, [greedy | {"model": name, "prompt": prompts[name]} for name in prompts])
        for stream, (name, prompt) in zip(streams, prompts.items(), strict=True):
            assert len(stream.tokens) == MAX_TOKENS, stream.error
            assert behind(market.models[name], prompt, stream.tokens) <= ROUNDING, name
        _moves_little(server, market)
        _comes_and_goes(server, market)
        _is_added_to_a_base_by_name(server, market)
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


def _is_added_to_a_base_by_name(server: Server, market: Market) -> None:
    client, path = AdminClient(server.url), market.directory / "adapter-2"
    assert client.add(str(path), "named", base="base")["parent"] == "base"
    assert ask(server, "named") == ask(server, "adapter-2")
    client.remove("named")
    other, none = market.directory / "other", market.directory / "none"
    for source, base, reason in (
        (path, "nobody", f"{path}: there is no model named 'nobody' that could be its base"),
        (path, "adapter-1", f"{path}: there is no model named 'adapter-1' that could be its base"),
        (
            path,
            "other",
            f"{path}: it is an adapter of '{market.directory / 'base'}', which is served as 'base', not of ",
        ),
        (other, "base", f"{other}: there is no adapter_config.json, so it is not an adapter"),
        (none, "base", f"{none}: no such file or directory"),
    ):
        with pytest.raises(Refused) as caught:
            client.add(str(source), "named", base=base)
        assert caught.value.message.startswith(reason) and "\n" not in caught.value.message


def ask(server: Server, model: str) -> list[int]:
    body = {"model": model, "prompt": [5, 9, 31, 7], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answered = server.post("/v1/completions", body | {"return_token_ids": True})
    assert answered.status_code == 200, answered.text
    tokens: list[int] = answered.json()["choices"][0]["token_ids"]
    return tokens
