"""Each type's numbers are those of the `gguf` package, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from aegis.models.gguf.blocks import BLOCKS, FLOATS, Kind, dequantized, integers

BLOCK_COUNT = 512


def drawn(kind: Kind) -> np.ndarray:
    """Any bytes, so scales that are infinite or no numbers too."""
    return np.random.default_rng(int(kind)).integers(0, 256, (BLOCK_COUNT, BLOCKS[kind].nbytes), dtype=np.uint8)


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
def test_numbers_are_the_package_s(kind: Kind) -> None:
    blocks = drawn(kind)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(int(kind)))
    assert dequantized(kind, blocks).view(np.uint32).tolist() == expected.view(np.uint32).tolist()


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
def test_sizes_and_names_are_the_package_s(kind: Kind) -> None:
    assert gguf.GGMLQuantizationType(int(kind)).name == kind.name
    assert tuple(BLOCKS[kind]) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(int(kind))]


def test_types_that_are_not_read_have_the_package_s_names() -> None:
    for kind in set(Kind) - BLOCKS.keys():
        assert gguf.GGMLQuantizationType[kind.name] == int(kind)


@pytest.mark.parametrize("kind", sorted(FLOATS), ids=lambda kind: kind.name)
def test_numbers_are_a_copy_that_may_be_written(kind: Kind) -> None:
    blocks = drawn(kind)
    blocks.flags.writeable = False
    assert dequantized(kind, blocks).flags.writeable


@pytest.mark.parametrize(("kind", "least", "most"), [(Kind.Q4_0, -8, 7), (Kind.Q8_0, -128, 127)])
def test_integers_times_scales_are_the_numbers(kind: Kind, least: int, most: int) -> None:
    values = np.random.default_rng(0).standard_normal((BLOCK_COUNT, 32)).astype(np.float32)
    blocks = gguf.quants.quantize(values, gguf.GGMLQuantizationType(int(kind)))
    found = integers(kind, blocks)
    assert (found.values.dtype, found.values.shape) == (np.int8, (BLOCK_COUNT, 32))
    assert (found.scales.dtype, found.scales.shape) == (np.float16, (BLOCK_COUNT,))
    assert least <= found.values.min() and found.values.max() <= most
    assert np.array_equal(found.scales.astype(np.float32)[:, None] * found.values, dequantized(kind, blocks))
    assert np.abs(dequantized(kind, blocks) - values).max() < 0.5
