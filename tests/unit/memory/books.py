"""Sizes and models that the tests of an instance's books share."""

from __future__ import annotations

from hypothesis import strategies as st

from aegis.core.effects import (
    StreamName,
)
from aegis.sim.faults.fake_models import PAGE, make_spec
from memory.budget import Budget

SLAB = 2 * PAGE
SPECS = [
    make_spec(i, image_pages=pages, block_bytes=block_bytes)
    for i, (pages, block_bytes) in enumerate([(2, SLAB // 8), (3, SLAB // 2), (5, SLAB), (1, SLAB // 8)])
]
BUDGET = Budget(pages=12, page_bytes=PAGE, slab_bytes=SLAB, host_slabs=6, instances=2)
WORDS = {name: i for i, name in enumerate(StreamName)}
models = st.sampled_from([spec.model for spec in SPECS])
