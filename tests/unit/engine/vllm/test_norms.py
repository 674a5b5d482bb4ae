from __future__ import annotations

import pytest
import torch

from aegis.engine.vllm.version import refusal

if reason := refusal():
    pytest.skip(reason, allow_module_level=True)

import vllm.ir
from torch import Tensor

from aegis.engine.vllm.adapter import on_cpu
from tests.unit.engine.vllm.test_engine import attached, make

if not on_cpu():
    pytest.skip("this vLLM was built for GPUs, whose norms are its own", allow_module_level=True)

EPSILON = 1e-6


@pytest.fixture(scope="module", autouse=True)
def _initialised(tmp_path_factory: pytest.TempPathFactory) -> None:
    attached(make("llama", tmp_path_factory.mktemp("models") / "llama", engine="vllm"))


def normed(x: Tensor, weight: Tensor | None) -> Tensor:
    x = x.double()
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPSILON)
    return x if weight is None else x * weight.double()


def rows(width: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    draws = torch.Generator().manual_seed(width)
    x, residual = (torch.randn(5, width, generator=draws).to(dtype) for _ in range(2))
    return x, residual, torch.randn(width, generator=draws).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [8, 120, 512])
def test_rows_go_through_the_kernels(width: int, dtype: torch.dtype) -> None:
    near = 1e-6 if dtype == torch.float32 else 3e-2
    x, residual, weight = rows(width, dtype)
    norm, add_and_norm = vllm.ir.ops.rms_norm, vllm.ir.ops.fused_add_rms_norm
    assert norm.dispatch(x, weight, EPSILON).provider == "aegis"
    assert add_and_norm.dispatch(x, residual, weight, EPSILON).provider == "aegis"
    torch.testing.assert_close(norm(x, weight, EPSILON).double(), normed(x, weight), rtol=near, atol=near)
    total = x.double() + residual.double()
    out, carried = add_and_norm.maybe_inplace(x, residual, weight, EPSILON)
    torch.testing.assert_close(carried.double(), total, rtol=near, atol=near)
    torch.testing.assert_close(out.double(), normed(total, weight), rtol=near, atol=near)


def test_what_the_kernels_cannot_do_is_left_to_torch() -> None:
    """They take rows that are one after the other, of eights, and of the weight's type."""
    x, residual, weight = rows(64)
    odd, odd_residual, odd_weight = rows(36)
    for case, (at, by) in {
        "heads in a wider row": (x[:, 8:40].view(5, 2, 16), weight[:16]),
        "rows with a gap": (x[:, :32], weight[:32]),
        "no weight": (x, None),
        "weight of another type": (x, weight.bfloat16()),
        "not of eights": (odd, odd_weight),
    }.items():
        assert vllm.ir.ops.rms_norm.dispatch(at, by, EPSILON).provider == "native", case
        close = 2e-2 if by is not None and by.dtype != at.dtype else 1e-6
        torch.testing.assert_close(
            vllm.ir.ops.rms_norm(at, by, EPSILON).double(), normed(at, by), rtol=close, atol=close, msg=case
        )
    add_and_norm = vllm.ir.ops.fused_add_rms_norm
    assert add_and_norm.dispatch(x, residual[:, :32], weight, EPSILON).provider == "native"
    assert add_and_norm.dispatch(odd, odd_residual, odd_weight, EPSILON).provider == "native"
