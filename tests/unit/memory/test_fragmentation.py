"""Slabs of many shapes under a load that wanders between them, on the books alone (Aegaeon §5.2 and §7.4)."""

import pytest

from aegis.core.model import KvLayer, KvShape
from bench.lab.memory.slab_replay import MARKET_SHAPES, MARKET_SLAB_BYTES, Load, replay
from tests.long_forms import first_rows_of

BAR = 0.10
FIXED_BAR = 0.40
PAGE = 2 << 20
LOAD = Load(steps=1200, shift_steps=150)
DEMO_SHAPES = tuple(
    KvShape((KvLayer(heads, dim, dim),) * layers, "float32", 4)
    for layers, heads, dim in (
        (4, 2, 40),
        (4, 5, 32),
        (5, 2, 48),
        (4, 1, 44),
        (4, 2, 44),
        (4, 1, 64),
        (3, 4, 44),
        (4, 8, 20),
    )
)
"""The demo market's."""


@pytest.mark.parametrize(
    ("shapes", "slab_bytes"),
    first_rows_of(1, [(DEMO_SHAPES, PAGE), (MARKET_SHAPES, MARKET_SLAB_BYTES)]),
    ids=["demo", "market"],
)
def test_little_is_wasted_where_a_pool_per_shape_would_waste_much(shapes: tuple[KvShape, ...], slab_bytes: int) -> None:
    waste = replay(shapes, LOAD, slab_bytes=slab_bytes)
    assert waste.shared < BAR and waste.moved_bytes > 0
    assert waste.fixed > FIXED_BAR


@pytest.mark.parametrize(
    ("shapes", "slab_bytes"),
    first_rows_of(1, [(DEMO_SHAPES, PAGE), (MARKET_SHAPES, MARKET_SLAB_BYTES)]),
    ids=["demo", "market"],
)
def test_holes_have_to_be_closed_for_that(shapes: tuple[KvShape, ...], slab_bytes: int) -> None:
    waste = replay(shapes, LOAD, slab_bytes=slab_bytes, compacting=False)
    assert waste.shared > BAR and waste.moved_bytes == 0


def test_one_shape_wastes_little_whatever_holds_it() -> None:
    waste = replay(MARKET_SHAPES[:1], LOAD)
    assert waste.fixed < BAR
