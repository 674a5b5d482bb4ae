"""What docs/checkpoints.md says can be served, against registrations of a checkpoint of each kind.

Rows of vLLM are tried where it is installed: `make test-vllm`.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from aegis.core.errors import ModelRefused
from aegis.core.ids import ModelId
from aegis.core.model import EngineName, ModelSpec
from aegis.engine.vllm import version
from aegis.models import self_check
from aegis.models.gguf.architectures import ARCHITECTURES as GGUF
from aegis.models.served import ADAPTER, ARCHITECTURES, FORMS, Architecture, Form, Outcome
from aegis.models.sources import Source
from tests import checkpoints, embedders, quantised_checkpoints
from tests.live import zoo
from tests.long_forms import first_of
from tests.registering import register
from tests.unit.models.quantised.test_refused import NF4, looked_up

with_vllm = pytest.mark.skipif(version.refusal() is not None, reason="vLLM is not installed")
ENGINES: tuple[Any, ...] = ("transformers", pytest.param("vllm", marks=with_vllm))
WIDE = {"head_dim": 32, "hidden_size": 128, "query_pre_attn_scalar": 32}
"""Heads for which vLLM has kernels."""

OWN: dict[str, dict[str, Any]] = {
    "deepseek_v2": {},
    "deepseek_v3": {"kv_lora_rank": 16, "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16}
    | {"v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
    | {"n_group": 1, "topk_group": 1}
    | {"moe_intermediate_size": 48, "num_key_value_heads": 4, "head_dim": 8},
    "gpt2": {"n_embd": 128},
    "gpt_bigcode": {"n_embd": 128},
    "opt": {"hidden_size": 128, "ffn_dim": 96, "word_embed_proj_dim": 128},
}


def dense(path: Path) -> Path:
    return checkpoints.write(path, "llama", **WIDE)


def quantised(settings: dict[str, Any], pack: quantised_checkpoints.Pack, path: Path) -> Path:
    quantised_checkpoints.write(path, "llama", settings, pack)
    return path


def gguf(path: Path) -> Path:
    if not find_spec("gguf"):
        pytest.skip("the package that writes them is not installed")
    from tests import gguf_files

    gguf_files.write(path.with_suffix(".gguf"), "llama", "Q8_0")
    return path.with_suffix(".gguf")


def adapter(path: Path) -> Path:
    path.mkdir()
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8, "base_model_name_or_path": "m"}))
    save_file({"weight": torch.zeros(2)}, path / "adapter_model.safetensors")
    return path


def pickled(path: Path) -> Path:
    (dense(path) / "model.safetensors").rename(path / "pytorch_model.bin")
    return path


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
COMPRESSED = quantised_checkpoints.compressed_config("pack-quantized", {"num_bits": 4, "group_size": 128})
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
MADE: dict[str, Callable[[Path], Path]] = {
    "safetensors": dense,
    "GGUF": gguf,
    "GPTQ": partial(quantised, GPTQ, quantised_checkpoints.gptq()),
    "AWQ": partial(quantised, AWQ, quantised_checkpoints.awq()),
    "compressed-tensors": partial(quantised, COMPRESSED, quantised_checkpoints.packed()),
    "FP8": partial(quantised, FP8, quantised_checkpoints.fp8()),
    "bitsandbytes": partial(quantised, NF4, looked_up),
    "embedder": lambda path: embedders.write(path, "bert", pooling={"pooling_mode_cls_token": True}),
    "reranker": lambda path: embedders.write_reranker(path, "bert"),
    "classifier of several labels": lambda path: embedders.write_reranker(path, "bert", labels=3),
    "LoRA adapter": adapter,
    "pickled weights": pickled,
}


def check_with(engine: EngineName) -> Callable[..., None]:
    """What every registration is compared by."""

    def make(*arguments: Any, **options: Any) -> Any:
        if engine == "vllm":
            from aegis.engine.vllm.engine import VllmEngine

            return VllmEngine(*arguments, **options)
        from aegis.engine.transformers_engine import TransformersEngine

        return TransformersEngine(*arguments, **options)

    return lambda spec, model: None if spec.manifest.pooling else self_check.check(spec, model, make_engine=make)


def holds(outcome: Outcome, path: Path, cache: Path, engine: EngineName, weights: str = "dense") -> ModelSpec | None:
    """The registration ends as declared: in a model that answers as transformers' own does, or in one line."""
    source = Source(ModelId("m"), path=str(path))
    begin = partial(register, source, dtype="float32", cache_dir=cache, engine=engine, check=check_with(engine))
    if outcome.served:
        return begin(weights=weights)  # type: ignore[arg-type]
    with pytest.raises(ModelRefused) as refused:
        begin(weights=weights)  # type: ignore[arg-type]
    assert outcome.told in refused.value.message, refused.value.message
    assert "\n" not in refused.value.message and len(refused.value.message) < 500
    return None


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_form_is_served_as_declared(form: Form, engine: EngineName, tmp_path: Path) -> None:
    if form.name == ADAPTER and engine == "transformers":
        pytest.skip("alone it has no base: tests/unit/models/adapters register it beside one")
    path = MADE[form.name.partition(",")[0]](tmp_path / "m")
    outcome = form.vllm if engine == "vllm" else form.transformers
    spec = holds(outcome, path, tmp_path / "cache", engine, form.weights)
    if spec:
        assert spec.manifest.engine == (
            engine if form.vllm.told != "the same: by the transformers engine" else "transformers"
        )
        assert form.weights == "dense" or spec.manifest.quantised is not None


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("each", first_of(8, list(ARCHITECTURES)), ids=lambda each: each.model_type)
def test_an_architecture_is_served_as_declared(each: Architecture, engine: EngineName, tmp_path: Path) -> None:
    path = checkpoints.write(tmp_path / "m", each.model_type, **OWN.get(each.model_type, WIDE))
    if engine == "vllm":
        holds(each.vllm, path, tmp_path / "cache", engine)
        return
    holds(each.transformers, path, tmp_path / "cache", engine)
    holds(each.int8 or each.transformers, path, tmp_path / "cache", engine, "int8")


def test_all_architectures_of_other_tests_and_of_gguf_files_are_listed() -> None:
    from tests.unit.engine import test_transformers_engine

    served = {each.model_type for each in ARCHITECTURES if each.transformers.served}
    assert served >= {*test_transformers_engine.ARCHITECTURES, *zoo.SERVED}
    refused = {each.model_type for each in ARCHITECTURES if not each.transformers.served}
    assert refused >= set(zoo.REFUSED)
    assert {known.model_type for known in GGUF.values()} <= served
    of_vllm = Path(test_transformers_engine.__file__).parent / "vllm" / "test_engine.py"
    tree = ast.parse(of_vllm.read_text(encoding="utf-8"))
    named = next(
        node.value for node in tree.body if isinstance(node, ast.AnnAssign) and _is_named(node, "ARCHITECTURES")
    )
    assert isinstance(named, ast.Dict)
    tried = {key.value for key in named.keys if isinstance(key, ast.Constant)}
    assert tried <= {each.model_type for each in ARCHITECTURES if each.vllm.served}


def _is_named(node: ast.AnnAssign, name: str) -> bool:
    return isinstance(node.target, ast.Name) and node.target.id == name
