"""Gated MLPs in the memory of their first factor."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from transformers.activations import ACT2FN
from transformers.models.gemma2.modeling_gemma2 import Gemma2Config, Gemma2MLP
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP
from transformers.models.phi3.modeling_phi3 import Phi3Config, Phi3MLP
from transformers.models.qwen3.modeling_qwen3 import Qwen3Config, Qwen3MLP

from aegis.engine.gated_mlps import use_own_memory

SIZES = {"hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 4}
MLPS = {
    "llama": lambda: LlamaMLP(LlamaConfig(**SIZES)),
    "qwen3": lambda: Qwen3MLP(Qwen3Config(**SIZES)),
    "gemma2": lambda: Gemma2MLP(Gemma2Config(**SIZES)),
}


@pytest.mark.parametrize("kind", MLPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_the_result_is_the_same_bit_by_bit(kind: str, dtype: torch.dtype) -> None:
    mlp = MLPS[kind]().to(dtype)
    inputs = [torch.randn(shape, dtype=dtype) for shape in ((1, 1, 48), (1, 33, 48), (7, 48))]
    expected, given = [mlp(x) for x in inputs], [x.clone() for x in inputs]
    use_own_memory(torch.nn.Sequential(mlp))
    assert "forward" in vars(mlp)
    assert all(torch.equal(mlp(x), y) for x, y in zip(inputs, expected, strict=True))
    assert all(map(torch.equal, inputs, given))


@torch.inference_mode()
def test_the_product_is_where_the_first_factor_was() -> None:
    mlp, seen = MLPS["llama"](), list[int]()
    use_own_memory(mlp)
    mlp.gate_proj.register_forward_hook(lambda _, __, made: seen.append(made.data_ptr()))
    mlp.down_proj.register_forward_pre_hook(lambda _, taken: seen.append(taken[0].data_ptr()))
    mlp(torch.randn(5, 48))
    assert len(seen) == 2 and seen[0] == seen[1]


@torch.inference_mode()
def test_factors_of_two_dtypes_are_multiplied_as_torch_does() -> None:
    mlp = MLPS["llama"]()
    mlp.gate_proj.register_forward_hook(lambda _, __, made: made.bfloat16())
    x = torch.randn(5, 48)
    expected = mlp(x)
    use_own_memory(mlp)
    assert torch.equal(mlp(x), expected)


def test_an_mlp_that_nobody_needs_is_gone_at_once() -> None:
    mlp = MLPS["llama"]()
    use_own_memory(mlp)
    gone = weakref.ref(mlp)
    gc.disable()
    try:
        del mlp
        assert gone() is None
    finally:
        gc.enable()


def test_what_computes_otherwise_stays() -> None:
    class Scaled(LlamaMLP):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) * 2)
            return result

    kept = [Phi3MLP(Phi3Config(**SIZES)), Scaled(LlamaConfig(**SIZES)), ACT2FN["silu"], torch.nn.Linear(4, 4)]
    use_own_memory(torch.nn.ModuleList(kept))
    assert all("forward" not in vars(part) for part in kept)
