"""GGUF files are served as the models that their weights make, quantised as they are; a broken one harms nobody."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from tests import checkpoints, gguf_files
from tests.live.market import Reference
from tests.live.server import SPLIT, launched
from tests.live.streams import Body, run_all

MAX_TOKENS = 30
WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
"""K-quants have blocks of 256."""

FILES = {
    "llama-f16": ("llama", "F16", {}),
    "llama-q4_0": ("llama", "Q4_0", {}),
    "llama-q4_k": ("llama", "Q4_K", WIDE),
    "qwen2-q8_0": ("qwen2", "Q8_0", {}),
}
LATE = "qwen3-q5_k"


class Written(NamedTuple):
    file: Path
    reference: Reference


def write(directory: Path, name: str, model_type: str, kind: str, **changes: object) -> Written:
    """A file, and the model that it stands for as a checkpoint of its own."""
    reference = directory.parent / "references" / name
    reference.mkdir(parents=True)
    checkpoints.write_tokenizer(reference)
    file = directory / f"{name}.gguf"
    gguf_files.write(file, model_type, kind, tokenizer=reference, **changes).save_pretrained(reference)
    return Written(file, Reference(reference))


@pytest.fixture(scope="module")
def market(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Written]:
    directory = tmp_path_factory.mktemp("gguf") / "market"
    directory.mkdir()
    return {name: write(directory, name, *made, **changes) for name, (*made, changes) in FILES.items()}


def test_files_are_served_and_broken_ones_harm_nobody(market: dict[str, Written], tmp_path: Path) -> None:
    alone = market["llama-f16"].file.rename(tmp_path / "llama-f16.gguf")
    options = ["--models", str(alone), "--models", str(market["llama-q4_0"].file.parent), "--dtype", "float32", *SPLIT]
    (tmp_path / "late").mkdir()
    late = write(tmp_path / "late", LATE, "qwen3", "Q5_K", **WIDE)
    huge = tmp_path / "huge.gguf"
    huge.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + (1 << 60).to_bytes(8, "little") * 2)
    with launched(tmp_path / "server", tmp_path / "cache", *options, "--device-memory", "64MiB") as server:
        server.wait_for_ready()
        told = server.output()
        assert "Q4_0 file, runs as int4" in told and "F16 file, runs as float32" in told
        refused = server.post("/models/load", {"source": str(huge)})
        assert refused.status_code == 400
        assert refused.json()["error"]["message"] == (
            f"{huge}: its header announces {1 << 60} tensors, at most 65536 are read"
        )
        added = server.post("/models/load", {"source": str(late.file)})
        assert added.json()["detail"] == "Q5_K file, runs as float32", added.text
        all_of_them = market | {LATE: late}
        bodies, expected = list[Body](), list[list[int]]()
        for name, written in all_of_them.items():
            prompt, answer = written.reference.clear_case("gguf", name, length=40, max_tokens=MAX_TOKENS)
            bodies.append({"model": name, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0})
            expected.append(answer.tokens)
        for body, stream, tokens in zip(bodies, run_all(server.url, bodies), expected, strict=True):
            assert stream.tokens == tokens, body["model"]
        message = {"role": "user", "content": "the cat and the hat"}
        asked = {"model": "llama-q4_0", "messages": [message], "max_tokens": 8, "temperature": 0}
        answered = server.post("/v1/chat/completions", asked).json()
        reference = market["llama-q4_0"].reference
        prompt = reference.tokenizer.apply_chat_template([message], return_dict=False)
        assert answered["usage"]["prompt_tokens"] == len(prompt)
        assert answered["choices"][0]["message"]["content"] == reference.answer(prompt, max_tokens=8)
        server.wait_for_freed_memory()
