"""vLLM's own kernels for norms, where it would run single torch operations: on a CPU.

Norms are operations of its IR, each with implementations in an order of priority. Those in C are registered for GPUs
only, though its builds for CPUs have them too; stock vLLM compiles its models there instead, which takes half a minute
for each. Its kernels for activations are left alone: from eight rows on they are slower than torch.
"""

from __future__ import annotations

import torch
import vllm.ir
from torch import Tensor
from vllm.config import VllmConfig
from vllm.platforms import current_platform

_OURS = "aegis"
_LANES = 8  # a row has to be a multiple of it


def _plain(x: Tensor, weight: Tensor | None, variance_size: int | None) -> bool:
    return (
        variance_size is None
        and weight is not None
        and weight.dtype == x.dtype
        and x.shape[-1] % _LANES == 0
        and x.is_contiguous()
    )


def _norms(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    return _plain(x, weight, variance_size)


def _adds_and_norms(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    return _plain(x, weight, variance_size) and x_residual.dtype == x.dtype and x_residual.is_contiguous()


def _rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    normed = torch.empty_like(x)
    torch.ops._C.rms_norm(normed, x, weight, epsilon)
    return normed


def _fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual


def register() -> None:
    """Registers the norms with vLLM. Called once, before a model is built."""
    current_platform.import_kernels()
    operations = vllm.ir.ops
    operations.rms_norm.register_impl(_OURS, supports_args=_norms)(_rms_norm)
    operations.fused_add_rms_norm.register_impl(_OURS, supports_args=_adds_and_norms, inplace=True)(_fused_add_rms_norm)


def prefer(config: VllmConfig) -> None:
    """Has vLLM use the norms in this process, wherever they fit."""
    order = config.kernel_config.ir_op_priority
    order.rms_norm = order.fused_add_rms_norm = [_OURS, "native"]
