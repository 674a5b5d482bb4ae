"""The compiled code, where it was built and this processor can run it, and its structures as C has them."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch

from aegis.engine.packed_linear import pack
from aegis.engine.quantised.blocks import bytes_are_known, halves_are_known
from aegis.engine.quantised.digits import supported as has_byte_products

ROWS, PACKED, INT8, INT4, NARROW = range(5)
"""`NARROW` is packed in blocks of half as many rows."""
FLOATS, _, HALVES = range(3)
BLOCK = 64
RANK_MAX = 512
COLUMNS_MAX = 1 << 15

_TURN_OFF = "AEGIS_NO_COMPILED_STEPS"
_INTERFACE = "aegis_interface_3"
"""What is built of sources of another one waits for `make` to build it anew, and is not called."""


class Linear(ctypes.Structure):
    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("rows", ctypes.c_int32),
        ("columns", ctypes.c_int32),
        ("form", ctypes.c_int32),
        ("group", ctypes.c_int32),
    )


LINEARS = ("query", "key", "value", "output", "gate", "up", "down")
NORMS = ("before_attention", "before_mlp", "of_query", "of_key")


class Layer(ctypes.Structure):
    _fields_ = (
        *((name, Linear) for name in LINEARS),
        *((name, ctypes.c_void_p) for name in NORMS),
        ("keys", ctypes.c_int64),
        ("values", ctypes.c_int64),
    )


class Model(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("layers", "hidden", "inner", "heads", "kv_heads", "head")),
        ("vocabulary", ctypes.c_int32),
        ("bf16", ctypes.c_int32),
        *((name, ctypes.c_float) for name in ("epsilon", "scaling", "rotary_scaling")),
        ("embedding", ctypes.c_void_p),
        ("last_norm", ctypes.c_void_p),
        ("frequencies", ctypes.c_void_p),
        ("last", Linear),
        ("layer", ctypes.POINTER(Layer)),
        ("kv", ctypes.c_void_p),
        ("unit", ctypes.c_int64),
        ("block", ctypes.c_int64),
        ("block_tokens", ctypes.c_int32),
    )


class Change(ctypes.Structure):
    """What an adapter adds to a layer. Of rank 0: nothing."""

    _fields_ = (
        ("down", ctypes.c_void_p),
        ("up", ctypes.c_void_p),
        ("rank", ctypes.c_int32),
        ("scale", ctypes.c_float),
    )


class Step(ctypes.Structure):
    _fields_ = (
        ("rows", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("tokens", "positions", "first_unit", "units", "logits", "scratch")),
        ("changes", ctypes.c_void_p),
    )


@cache
def library() -> ctypes.CDLL | None:
    """None: steps cannot run through it here."""
    found = _opened()
    return None if isinstance(found, str) else _declared(found)


def missing() -> str | None:
    """Why steps cannot run through it here, in a few words; None: they can."""
    found = _opened()
    return found if isinstance(found, str) else None


@cache
def _opened() -> ctypes.CDLL | str:
    """The library, or why there is none that can run."""
    if os.environ.get(_TURN_OFF):
        return f"{_TURN_OFF} turns them off"
    built = (Path(__file__).with_name(f"_steps{suffix}") for suffix in EXTENSION_SUFFIXES)
    path = next((path for path in built if path.exists()), None)
    if path is None:
        return "they were not compiled where aegis was installed: that needs x86-64 and a C compiler"
    try:
        found = ctypes.CDLL(str(path))
    except OSError:
        return "they were compiled for another machine"
    if not hasattr(found, _INTERFACE):
        return "they were compiled of older sources; install aegis again"
    return found if found.aegis_supported() else "this processor lacks AVX-512, or its VNNI, VBMI or BF16"


def _declared(found: ctypes.CDLL) -> ctypes.CDLL:
    found.aegis_set_up.restype = None
    found.aegis_set_up()
    found.aegis_scratch_bytes.restype = ctypes.c_int64
    found.aegis_scratch_bytes.argtypes = (ctypes.POINTER(Model), ctypes.c_int64, ctypes.c_int64)
    found.aegis_product_bytes.restype = ctypes.c_int64
    found.aegis_product_bytes.argtypes = (ctypes.POINTER(Linear), ctypes.c_int64)
    found.aegis_product.restype = None
    found.aegis_product.argtypes = (
        ctypes.POINTER(Linear),
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_void_p,
        ctypes.c_int,
    )
    found.aegis_decode.restype = None
    found.aegis_decode.argtypes = (ctypes.POINTER(Model), ctypes.POINTER(Step))
    found.aegis_add_changes.restype = None
    found.aegis_add_changes.argtypes = (
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int64,
        *(ctypes.c_int for _ in ("columns", "results", "numbers", "threads")),
    )
    _lend_threads(found)
    return found


def _lend_threads(found: ctypes.CDLL) -> None:
    """torch brings an OpenMP of its own, whose threads wait for work already; a second one would get as many again."""
    for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*")):
        openmp = ctypes.CDLL(str(path))
        names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
        found.aegis_use_threads(*(ctypes.cast(getattr(openmp, name), ctypes.c_void_p) for name in names))
        return


@cache
def knows(form: int, dtype: torch.dtype) -> bool:
    """Whether this machine's torch lays weights of this form out as the compiled code reads them."""
    if form == INT8:
        return has_byte_products() and bytes_are_known()
    if form == INT4:
        return dtype == torch.bfloat16 and halves_are_known()
    if form == ROWS:
        return True
    if form == NARROW and dtype != torch.bfloat16:
        return False
    rows, columns, many = 2 * BLOCK, 2 * BLOCK, 2 if dtype == torch.bfloat16 else 1
    block = BLOCK // 2 if form == NARROW else BLOCK
    weight = torch.arange(rows * columns, dtype=torch.int32).remainder(251).to(dtype).view(rows, columns)
    expected = weight.view(-1, block, columns // many, many).transpose(1, 2).contiguous()
    return torch.equal(pack(weight)[1], expected.view(-1).view(torch.uint8))
