"""Models of all kinds on two mixed instances, in memory for some of them: 64 streams at once say what each model says
alone, token for token, and so do the vectors that are asked for meanwhile."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from aegis.core.rng import Stream as Draws
from aegis.models.quantising import replace_weights
from tests import adapters, checkpoints, embedders, gguf_files
from tests.checkpoints import VOCAB_SIZE
from tests.live.greedy import ROUNDING, behind
from tests.live.server import Server, launched
from tests.live.streams import WAIT_S, Body, Stream, client_of, run_all
from tests.long_forms import LONG

STREAMS_PER_MODEL = 8
PROMPT_TOKENS_MAX = 60
OUTPUT_TOKENS_MIN, OUTPUT_TOKENS_MAX = (100, 180) if LONG else (12, 28)
CLOSE = 1e-4
TEXTS = ("the cat sat on the mat", "a hat", "rain fell into seas of blue while they ran again over green hills")
EMBEDDER = "embedder"
SWITCHES_MIN = 16
MEMORY = "8MiB"


@dataclass(frozen=True, slots=True)
class Market:
    """`models` generate: as transformers has each of them alone, in float32. `entries` say how they are served."""

    directory: Path
    models: dict[str, PreTrainedModel] = field(default_factory=dict)
    entries: dict[str, dict[str, str]] = field(default_factory=dict)

    @property
    def file(self) -> Path:
        return self.directory / "models.yaml"

    def add(self, name: str, model: PreTrainedModel, path: Path, **terms: str) -> None:
        self.models[name] = model.eval()
        self.entries[name] = {"path": str(path)} | terms


def _dense(path: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model


@pytest.fixture(scope="module")
def market(tmp_path_factory: pytest.TempPathFactory) -> Market:
    """One checkpoint is dense, int8, int4 and the base of adapters, all at once."""
    directory = tmp_path_factory.mktemp("kinds")
    made = Market(directory)
    base = checkpoints.write(directory / "llama", "llama", tokenizer=True, seed=1)
    made.add("base", _dense(base), base)
    for number in range(2):
        adapter = adapters.write(directory / f"adapter-{number}", base, seed=number)
        made.add(adapter.name, adapters.merged(base, adapter), adapter, base="base")
    for bits in ("int8", "int4"):
        model = _dense(base)
        replace_weights(model, bits)
        made.add(bits, model, base, weights=bits)
    other = checkpoints.write(directory / "qwen3", "qwen3", tokenizer=True, seed=2)
    made.add("qwen3", _dense(other), other)
    for kind, model_type in (("Q4_0", "llama"), ("Q8_0", "qwen2")):
        file = directory / f"{kind}.gguf"
        made.add(kind, gguf_files.write(file, model_type, kind, tokenizer=base, seed=3), file)
    path = embedders.write(directory / EMBEDDER, "bert", pooling={"pooling_mode_mean_tokens": True})
    made.file.write_text(json.dumps({"models": made.entries | {EMBEDDER: {"path": str(path)}}}))
    return made


@torch.inference_mode()
def vectors_of(market: Market) -> npt.NDArray[np.float32]:
    """What the embedder makes of each text alone: the mean over its tokens, of length 1."""
    path = market.directory / EMBEDDER
    model, tokenizer = AutoModel.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)
    means = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0) for text in TEXTS]
    return np.stack([(mean / mean.norm()).numpy() for mean in means])


def requests_of(market: Market) -> list[Body]:
    """Models take turns, and are asked the same."""
    bodies = []
    for number in range(STREAMS_PER_MODEL):
        draws = Draws(0, "all kinds", number)
        prompt = [draws.below(VOCAB_SIZE) for _ in range(1 + draws.below(PROMPT_TOKENS_MAX))]
        tokens = OUTPUT_TOKENS_MIN + draws.below(OUTPUT_TOKENS_MAX - OUTPUT_TOKENS_MIN + 1)
        asked = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        bodies += [asked | {"model": name} for name in market.models]
    return bodies


@pytest.fixture
def tight(market: Market, tmp_path: Path) -> Iterator[Server]:
    """Two instances on a device of four pages: two models and KV of both, or one and its adapters."""
    options = ["--models", str(market.file), "--dtype", "float32", "--mixed", "2", "--device-memory", MEMORY]
    options += ["--slo", "ttft=1,tbt=0.1", "--debug-memory"]
    with launched(tmp_path / "server", tmp_path / "cache", *options) as running:
        running.wait_for_ready()
        yield running


@pytest.mark.long
def test_64_streams_over_all_kinds_of_models_are_what_each_says_alone(
    market: Market, tight: Server, record_property: Callable[[str, object], None]
) -> None:
    told = tight.output()
    notes = ("int8, perplexity", "int4, perplexity", "Q4_0 file, runs as int4", "Q8_0 file, runs as int8")
    assert [note for note in notes if note not in told] == []
    before = tight.metrics()
    replies = list[npt.NDArray[np.float32]]()

    async def embed(streams: Sequence[Stream]) -> None:
        async with client_of(tight.url) as client:
            ends_s = time.monotonic() + WAIT_S
            while not all(stream.ended for stream in streams):
                assert time.monotonic() < ends_s, "some streams do not go on"
                reply = await client.post("/v1/embeddings", json={"model": EMBEDDER, "input": list(TEXTS)})
                assert not reply.is_error, reply.text
                replies.append(np.array([each["embedding"] for each in reply.json()["data"]], np.float32))

    bodies = requests_of(market)
    streams = run_all(tight.url, bodies, embed)
    assert len(streams) == 64
    for stream in streams:
        model, prompt = market.models[stream.body["model"]], stream.body["prompt"]
        assert stream.done and len(stream.tokens) == stream.body["max_tokens"], stream.error
        assert behind(model, prompt, stream.tokens) <= ROUNDING, stream.body
    assert len({tuple(stream.tokens[:OUTPUT_TOKENS_MIN]) for stream in streams}) > len(streams) * 3 // 4
    expected = vectors_of(market)
    assert max(float(np.abs(reply - expected).max()) for reply in replies) < CLOSE
    after = tight.wait_for_freed_memory()
    switches = after.total("model_switches_total") - before.total("model_switches_total")
    for name, figure in {"switches": switches, "embedded": len(replies)}.items():
        record_property(name, figure)
    assert switches >= SWITCHES_MIN
    assert after.instances() == ["mixed-0", "mixed-1"]
    assert all(after.total("instance_prefills_total", instance=name) for name in after.instances())
