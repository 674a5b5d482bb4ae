"""The bytes that a linear weight takes in each form: what is counted of an image, and what is stored of it.

Weights of 8 bits have a scale for each row. Those of 4 bits have a scale and a zero for each group of neighbours in a
row; where no group divides the rows they have 8 bits.
"""

from __future__ import annotations

from typing import Final

from aegis.core.model import WeightsName

GROUPS: Final = (128, 64, 32)
"""Sizes of groups that the kernels for 4 bits know."""

VECTOR: Final = 16
_ASKED: Final = {"int4": 128, "int4-g64": 64, "int4-g32": 32}


def group_of(weights: WeightsName, columns: int) -> int | None:
    """The group in which rows of so many columns are quantised to 4 bits; None: to 8 bits, with a scale a row."""
    asked = _ASKED.get(weights, 0)
    return next((group for group in GROUPS if group <= asked and columns % group == 0), None)


def is_whole(rows: int, columns: int) -> bool:
    """Whether kernels take it: they read whole vectors, also beyond its end."""
    return rows % VECTOR == 0 and columns % VECTOR == 0


def linear_bytes(weights: WeightsName, rows: int, columns: int, item_bytes: int) -> int:
    """Of a linear weight `[rows, columns]` whose items, and whose scales, have `item_bytes`."""
    elements = rows * columns
    if weights == "dense" or not is_whole(rows, columns):
        return elements * item_bytes
    group = group_of(weights, columns)
    if group is None:
        return elements + rows * item_bytes
    return elements // 2 + elements // group * 2 * item_bytes
