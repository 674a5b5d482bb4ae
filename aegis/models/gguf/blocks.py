"""Types of tensors in GGUF files, and the numbers that their blocks stand for.

A quantised tensor is rows of blocks, each of so many elements in so many bytes: integers, and the scales that they have
in common. The arithmetic is that of the `gguf` package, step by step in float32, so that results are the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]

SUPER = 256
"""Elements of a K-quant's block."""


class Kind(IntEnum):
    """The numbers that files have for types. Those of which nothing is read are named to be refused by name."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39


class Block(NamedTuple):
    elements: int
    nbytes: int


BLOCKS: Mapping[Kind, Block] = {
    Kind.F32: Block(1, 4),
    Kind.F16: Block(1, 2),
    Kind.BF16: Block(1, 2),
    Kind.Q4_0: Block(32, 2 + 16),
    Kind.Q4_1: Block(32, 4 + 16),
    Kind.Q5_0: Block(32, 2 + 4 + 16),
    Kind.Q5_1: Block(32, 4 + 4 + 16),
    Kind.Q8_0: Block(32, 2 + 32),
    Kind.Q4_K: Block(SUPER, 4 + 12 + 128),
    Kind.Q5_K: Block(SUPER, 4 + 12 + 32 + 128),
    Kind.Q6_K: Block(SUPER, 128 + 64 + 16 + 2),
}
"""The types that can be read."""

FLOATS = frozenset({Kind.F32, Kind.F16, Kind.BF16})

STAY = {Kind.Q4_0: 4, Kind.Q8_0: 8}
"""The bits of those whose integers layers can multiply as they are."""


class Integers(NamedTuple):
    """A tensor that is `scales[i] * values[i]` for each block i: int8 `[blocks, 32]`, and float16 `[blocks]`."""

    values: Array
    scales: Array


def integers(kind: Kind, blocks: Array) -> Integers:
    """What Q4_0 (-8 to 7) and Q8_0 (-128 to 127) store, unchanged. `blocks` are bytes `[blocks, Block.nbytes]`."""
    scales = blocks[:, :2].copy().view(np.float16)[:, 0]
    if kind is Kind.Q8_0:
        return Integers(blocks[:, 2:].view(np.int8), scales)
    assert kind is Kind.Q4_0
    return Integers(_nibbles(blocks[:, 2:]).view(np.int8) - np.int8(8), scales)


def dequantized(kind: Kind, blocks: Array) -> Array:
    """float32 `[blocks, Block.elements]` of bytes `[blocks, Block.nbytes]`."""
    with np.errstate(invalid="ignore", over="ignore"):  # scales that are no numbers make weights that are none
        return _DEQUANTIZE[kind](blocks)


def _f32(blocks: Array) -> Array:
    return blocks.copy().view(np.float32)  # of its own: the file's memory cannot be written


def _f16(blocks: Array) -> Array:
    return np.ascontiguousarray(blocks).view(np.float16).astype(np.float32)


def _bf16(blocks: Array) -> Array:
    return (np.ascontiguousarray(blocks).view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def _scaled(kind: Kind) -> Callable[[Array], Array]:
    def multiplied(blocks: Array) -> Array:
        values, scales = integers(kind, blocks)
        return scales.astype(np.float32)[:, None] * values.astype(np.float32)

    return multiplied


def _q4_1(blocks: Array) -> Array:
    return _f16(blocks[:, :2]) * _nibbles(blocks[:, 4:]).astype(np.float32) + _f16(blocks[:, 2:4])


def _q5_0(blocks: Array) -> Array:
    values = (_nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])).view(np.int8) - np.int8(16)
    return _f16(blocks[:, :2]) * values.astype(np.float32)


def _q5_1(blocks: Array) -> Array:
    values = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return _f16(blocks[:, :2]) * values.astype(np.float32) + _f16(blocks[:, 2:4])


def _q4_k(blocks: Array) -> Array:
    return _times_and_less(blocks, _pairs(blocks[:, 16:]))


def _q5_k(blocks: Array) -> Array:
    bits = (blocks[:, 16:48].reshape(-1, 1, 32) >> np.arange(8, dtype=np.uint8).reshape(1, 8, 1)) & np.uint8(1)
    return _times_and_less(blocks, _pairs(blocks[:, 48:]) | (bits << np.uint8(4)))


def _q6_k(blocks: Array) -> Array:
    scales = _f16(blocks[:, 208:]) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    low = _halves(blocks[:, :128].reshape(-1, 2, 1, 64)).reshape(-1, 8, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    values = (low | ((high.reshape(-1, 8, 32) & np.uint8(3)) << np.uint8(4))).view(np.int8) - np.int8(32)
    made: Array = scales[:, :, None] * values.reshape(-1, 16, 16).astype(np.float32)
    return made.reshape(-1, SUPER)


def _times_and_less(blocks: Array, values: Array) -> Array:
    """Q4_K and Q5_K: eight runs of 32 elements, each with a scale and a minimum of 6 bits. Of the 12 bytes of those,
    four begin with the first four scales, four with the first four minima; the last four hold the low halves of the
    others, whose upper two bits fill the first eight."""
    first, second, low = np.split(blocks[:, 4:16], 3, axis=1)
    scales = np.concatenate([first & 0x3F, (low & 0x0F) | ((first >> 2) & 0x30)], axis=1)
    minima = np.concatenate([second & 0x3F, (low >> 4) | ((second >> 2) & 0x30)], axis=1)
    scale = _f16(blocks[:, :2]) * scales.astype(np.float32)
    least = _f16(blocks[:, 2:4]) * minima.astype(np.float32)
    made: Array = scale[:, :, None] * values.astype(np.float32) - least[:, :, None]
    return made.reshape(-1, SUPER)


def _halves(packed: Array) -> Array:
    """Lower halves of bytes and then upper ones, along the last axis but one, which has length 1."""
    return (packed >> np.array([0, 4], np.uint8).reshape(2, 1)) & np.uint8(0x0F)


def _nibbles(packed: Array) -> Array:
    """All lower halves of a block's 16 bytes come first."""
    return _halves(packed.reshape(-1, 1, 16)).reshape(-1, 32)


def _pairs(packed: Array) -> Array:
    """Runs of 32 elements: two from each 32 bytes."""
    return _halves(packed.reshape(-1, 4, 1, 32)).reshape(-1, 8, 32)


def _fifth_bits(packed: Array) -> Array:
    return np.unpackbits(packed, axis=1, bitorder="little") << np.uint8(4)


_DEQUANTIZE: Mapping[Kind, Callable[[Array], Array]] = {
    Kind.F32: _f32,
    Kind.F16: _f16,
    Kind.BF16: _bf16,
    Kind.Q4_0: _scaled(Kind.Q4_0),
    Kind.Q4_1: _q4_1,
    Kind.Q5_0: _q5_0,
    Kind.Q5_1: _q5_1,
    Kind.Q8_0: _scaled(Kind.Q8_0),
    Kind.Q4_K: _q4_k,
    Kind.Q5_K: _q5_k,
    Kind.Q6_K: _q6_k,
}
