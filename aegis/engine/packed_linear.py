"""Linear layers whose weight lies in oneDNN's own order in memory of ours.

Weights in rows are put in order anew at each product, or read less well: in bfloat16 that costs half the speed of a
decode step. Packed once, when the image is written, they are bytes like any others, and a switch of models remains a
copy. How they are packed depends on torch's oneDNN and on the processor, so an image of packed weights does too.

torch has no way from Python to make an oneDNN tensor over given memory; its C interface for compiled models has.

oneDNN compiles a product for each number of rows. That takes half a millisecond, in bfloat16 one to nine, often longer
than the product, and half a MiB. So numbers of rows are rounded up.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import pad as pad_zeros

Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]

_DTYPES = (torch.float32, torch.bfloat16)


def packs(weight: torch.Tensor) -> bool:
    """Whether a weight can be packed on this machine."""
    if weight.ndim != 2 or weight.dtype not in _DTYPES or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    return weight.dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack(weight: torch.Tensor) -> tuple[bytes, torch.Tensor]:
    """oneDNN's description of how `weight [out, in]` is packed, and the packed bytes."""
    return described(torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()))


def described(packed: torch.Tensor) -> tuple[bytes, torch.Tensor]:
    """The same description, and the bytes, of a tensor that oneDNN has packed already."""
    return bytes(torch.ops.mkldnn._get_mkldnn_serialized_md(packed).numpy()), bytes_of(packed).clone()


def bytes_of(packed: torch.Tensor) -> torch.Tensor:
    """A view of the bytes of an oneDNN tensor, for as long as that lives."""
    handle = torch._C._aoti.unsafe_alloc_void_ptr_from_tensor(packed)
    address = ctypes.c_void_p()
    _succeed(_libtorch().aoti_torch_get_data_ptr(_pointer(handle), ctypes.byref(address)))
    torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(handle)
    there = (ctypes.c_uint8 * torch.ops.mkldnn._nbytes(packed)).from_address(address.value or 0)
    return torch.frombuffer(there, dtype=torch.uint8)


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`linear` by oneDNN, with a weight that is packed or lies in rows."""
    run = torch.ops.mkldnn._linear_pointwise.default
    *shape, width = x.shape
    count = prod(shape)
    more = rounded_up(count) - count
    if not more:
        result: torch.Tensor = run(x, weight, bias, "none", [], "")
        return result
    padded: torch.Tensor = run(pad_zeros(x.reshape(count, width), (0, 0, 0, more)), weight, bias, "none", [], "")
    return padded[:count].view(*shape, -1)


def rounded_up(rows: int) -> int:
    """The number of rows of the product that is compiled for so many, 27 for all up to 512."""
    step = 1 if rows <= 16 else 16 if rows <= 64 else 32 if rows <= 128 else 64
    return -(-rows // step) * step


def packed_linear(address: int, shape: Sequence[int], dtype: str, descriptor: bytes) -> Linear:
    """`linear` with the weight at the address, as `packed_at` has it."""
    weight = packed_at(address, shape, dtype, descriptor)

    def linear(x: torch.Tensor, _: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return product(x, weight, bias)

    return linear


def packed_at(address: int, shape: Sequence[int], dtype: str, descriptor: bytes) -> torch.Tensor:
    """The weight that `pack` described, over the bytes at `address`, of which it touches none. Only oneDNN's operators
    take it. Raises RuntimeError if the description is none."""
    library, result, (rows, columns) = _libtorch(), ctypes.c_void_p(), shape
    status = library.aoti_torch_create_tensor_from_blob_v2(
        ctypes.c_void_p(address),
        ctypes.c_int64(2),
        (ctypes.c_int64 * 2)(rows, columns),
        (ctypes.c_int64 * 2)(columns, 1),
        ctypes.c_int64(0),
        ctypes.c_int32(getattr(library, f"aoti_torch_dtype_{dtype}")()),
        ctypes.c_int32(library.aoti_torch_device_type_cpu()),
        ctypes.c_int32(0),
        ctypes.byref(result),
        ctypes.c_int32(library.aoti_torch_layout__mkldnn()),
        descriptor,
        ctypes.c_int64(len(descriptor)),
    )
    _succeed(status)
    tensor: torch.Tensor = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(_capsule(result))
    return tensor


@cache
def _libtorch() -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))


def _succeed(status: int) -> None:
    if status != 0:
        raise RuntimeError("torch refused an oneDNN tensor over given memory")


def _pointer(capsule: Any) -> ctypes.c_void_p:
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    return ctypes.c_void_p(get(capsule, None))


def _capsule(pointer: ctypes.c_void_p) -> Any:
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return new(pointer, None, None)
