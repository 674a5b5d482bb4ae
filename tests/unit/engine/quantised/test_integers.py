from __future__ import annotations

import pytest
import torch

from aegis.core.model import WeightsName
from aegis.engine.quantised.integers import Integers, check, dequantised, quantise

SOME = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("weights", "group"), [("int8", 256), ("int4", 128), ("int4-g64", 64), ("int4-g32", 32)])
def test_integers_are_the_nearest(weights: WeightsName, group: int, dtype: torch.dtype) -> None:
    weight = SOME.to(dtype)
    found = quantise(weight, weights)
    assert found is not None and found.group == group
    check(found)
    off = (dequantised(found) - weight.float()).abs().view(64, -1, group)
    clipped = 0.52 if dtype == torch.float32 else 1.1  # scales and zeros are rounded, so ends may lie beyond
    assert (off <= clipped * found.scales.unsqueeze(-1)).all()
    assert off.mean() < 0.3 * found.scales.mean()


def test_smaller_groups_are_nearer() -> None:
    names: tuple[WeightsName, ...] = ("int4", "int4-g64", "int4-g32", "int8")
    found = [quantise(SOME, name) for name in names]
    off = [float((dequantised(each) - SOME).norm()) for each in found if each]
    assert len(off) == 4 and off == sorted(off, reverse=True)


def test_scales_and_zeros_are_what_the_type_of_the_weight_can_hold() -> None:
    found = quantise((SOME.abs() + 1).bfloat16(), "int4")
    assert found is not None and found.zeros is not None
    for part in (found.scales, found.zeros):
        assert torch.equal(part.bfloat16().float(), part)


def test_a_group_of_one_value_is_exact() -> None:
    weight = torch.full((16, 64), 0.75)
    for name in ("int8", "int4"):
        found = quantise(weight, name)  # type: ignore[arg-type]
        assert found is not None
        torch.testing.assert_close(dequantised(found), weight, rtol=0.01, atol=0)
        assert (found.values == (127 if name == "int8" else 8)).all()
    zeros = quantise(torch.zeros(16, 64), "int8")
    assert zeros is not None and not dequantised(zeros).any()


def test_rows_without_groups_keep_eight_bits() -> None:
    found = quantise(torch.randn(32, 176), "int4")
    assert found is not None and (found.bits, found.group) == (8, 176)


@pytest.mark.parametrize("shape", [(16, 72), (72, 16), (8, 64)])
def test_shapes_that_kernels_would_read_beyond_stay_dense(shape: tuple[int, int]) -> None:
    assert quantise(torch.randn(shape), "int4") is None
    assert quantise(torch.randn(shape), "int8") is None


_VALUES = torch.zeros(16, 64, dtype=torch.int8)
_SCALES = torch.ones(16, 2)


@pytest.mark.parametrize(
    ("integers", "said"),
    [
        (Integers(4, _VALUES.int(), _SCALES), "not a matrix of int8"),
        (Integers(4, _VALUES[0], _SCALES), "not a matrix of int8"),
        (Integers(4, _VALUES, _SCALES[:8]), "scales of shape .8, 2. do not go with"),
        (Integers(4, _VALUES, torch.ones(16, 3)), "scales of shape .16, 3. do not go with"),
        (Integers(4, _VALUES, torch.ones(16)), "scales of shape .16. do not go with"),
        (Integers(4, _VALUES, torch.ones(16, 0)), "scales of shape .16, 0. do not go with"),
        (Integers(4, _VALUES, _SCALES, _SCALES[:, :1]), "zeros of shape"),
        (Integers(8, _VALUES, _SCALES, _SCALES), "zeros of shape"),
        (Integers(4, _VALUES - 1, _SCALES), "not between 0 and 15"),
        (Integers(4, _VALUES + 16, _SCALES), "not between 0 and 15"),
        (Integers(8, _VALUES, _SCALES / 0), "not finite"),
    ],
)
def test_integers_that_are_none_are_refused(integers: Integers, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check(integers)
