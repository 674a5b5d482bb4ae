"""What has to hold of a tensor of a quantised checkpoint before anything is made of it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from aegis.core.errors import ModelRefused


def given(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    if (found := tensors.get(name)) is None:
        raise ModelRefused(f"its {name} is missing")
    return found


def matrix(tensors: Mapping[str, torch.Tensor], name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
    found = given(tensors, name)
    if found.ndim != 2 or not found.numel() or (dtype and found.dtype != dtype):
        wanted = str(dtype).removeprefix("torch.") if dtype else "numbers"
        told = f"{str(found.dtype).removeprefix('torch.')} of shape {list(found.shape)}"
        raise ModelRefused(f"its {name} is {told}, not a matrix of {wanted}")
    return found


def floats(found: torch.Tensor | None, name: str) -> torch.Tensor:
    """The tensor in float32, once it is known to be there and finite. Raises ModelRefused."""
    if found is None:
        raise ModelRefused(f"its {name} is missing")
    if not found.dtype.is_floating_point or not found.numel():
        raise ModelRefused(f"its {name} is {str(found.dtype).removeprefix('torch.')} of shape {list(found.shape)}")
    return finite(found.float(), name)


def finite(found: torch.Tensor, name: str) -> torch.Tensor:
    if not bool(torch.isfinite(found).all()):
        raise ModelRefused(f"its {name} holds what is no finite number")
    return found


def integers(found: torch.Tensor, name: str, within: tuple[int, int]) -> torch.Tensor:
    least, most = within
    if found.dtype.is_floating_point or found.dtype.is_complex or not found.numel():
        raise ModelRefused(f"its {name} is {str(found.dtype).removeprefix('torch.')} of shape {list(found.shape)}")
    if not least <= int(found.min()) <= int(found.max()) <= most:
        raise ModelRefused(f"its {name} is not between {least} and {most}")
    return found
