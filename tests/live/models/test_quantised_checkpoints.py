"""Checkpoints that come quantised are served as the models that they stand for; one that lies harms nobody."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests import quantised_checkpoints as made
from tests.checkpoints import write_tokenizer
from tests.live.market import Reference
from tests.live.server import SPLIT, launched
from tests.live.streams import Body, run_all

pytestmark = pytest.mark.long

MAX_TOKENS = 30
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}

FORMS: dict[str, tuple[str, dict[str, object], made.Pack, str]] = {
    "llama-gptq": ("llama", GPTQ, made.gptq(group=32, symmetric=False), "GPTQ int4 of groups of 32, runs as int4"),
    "qwen2-w8": (
        "qwen2",
        made.compressed_config("int-quantized", {"num_bits": 8}),
        made.int8(),
        "compressed-tensors int8 of rows, runs as int8",
    ),
    "llama-fp8": ("llama", {"quant_method": "fp8", "weight_block_size": [64, 64]}, made.fp8((64, 64)), "FP8, runs as"),
}
LATE = "qwen2-awq"
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}


class Written(NamedTuple):
    directory: Path
    reference: Reference


def write(directory: Path, model_type: str, settings: dict[str, object], pack: made.Pack) -> Written:
    """The checkpoint, and the dense one that it stands for."""
    reference = directory.parent.parent / "references" / directory.name
    made.write(directory, model_type, settings, pack).save_pretrained(reference)
    write_tokenizer(reference)
    write_tokenizer(directory)
    return Written(directory, Reference(reference))


@pytest.fixture(scope="module")
def market(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Written]:
    directory = tmp_path_factory.mktemp("quantised") / "market"
    return {name: write(directory / name, *form) for name, (*form, _) in FORMS.items()}


def test_they_are_served_and_one_that_lies_harms_nobody(market: dict[str, Written], tmp_path: Path) -> None:
    directory = market["llama-fp8"].directory.parent
    late = write(tmp_path / "late" / LATE, "qwen2", AWQ, made.awq(64))
    layer = "model.layers.0.mlp.up_proj.scales"
    made.write(
        tmp_path / "liar", "llama", GPTQ, made.gptq(group=32), damage=lambda t: t.update({layer: torch.ones(3, 5)})
    )
    options = ["--models", str(directory), "--dtype", "float32", *SPLIT, "--device-memory", "64MiB"]
    with launched(tmp_path / "server", tmp_path / "cache", *options) as server:
        server.wait_for_ready()
        told = server.output()
        assert [note for *_, note in FORMS.values() if note not in told] == []
        refused = server.post("/models/load", {"source": str(tmp_path / "liar")})
        assert refused.status_code == 400
        assert refused.json()["error"]["message"] == (
            f"{tmp_path / 'liar'}: {layer.removesuffix('.scales')}: scales of shape [3, 5] do not go with a weight of "
            "[256, 128] in groups of 32"
        )
        added = server.post("/models/load", {"source": str(late.directory)})
        assert added.json()["detail"] == "AWQ int4 of groups of 64, runs as int4", added.text
        bodies, expected = list[Body](), list[list[int]]()
        for name, written in (market | {LATE: late}).items():
            prompt, answer = written.reference.clear_case("quantised", name, length=40, max_tokens=MAX_TOKENS)
            bodies.append({"model": name, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0})
            expected.append(answer.tokens)
        for body, stream, tokens in zip(bodies, run_all(server.url, bodies), expected, strict=True):
            assert stream.tokens == tokens, body["model"]
        server.wait_for_freed_memory()
