"""A sequence of the promised length fits, and one token more does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aegis.core.effects import StreamName
from aegis.core.ids import PageRun, SlabId
from aegis.core.messages import GrantPages
from aegis.core.model import KvShape
from aegis.sim.faults.fake_models import PAGE, make_shape, make_spec
from memory.budget import Budget
from memory.ledger import Ledger
from memory.pages import NoPages
from memory.slab_pool import NoBlocks

SLAB = 2 * PAGE
BUDGET = Budget(pages=12, page_bytes=PAGE, slab_bytes=SLAB, host_slabs=6, instances=2)
WORDS = {name: i for i, name in enumerate(StreamName)}
SHAPES = st.sampled_from([SLAB // 8, SLAB // 2, SLAB]).map(make_shape)


def books(budget: Budget, pages: int) -> Ledger:
    """Of an instance that was granted so many pages, and all the host slabs the node can lease to one."""
    ledger = Ledger(budget, WORDS, address_pages=1000)
    ledger.balloon.granted(GrantPages((PageRun(0, pages),)))
    ledger.grant([SlabId(i) for i in range(budget.host_slabs - (budget.instances - 1))])
    return ledger


def fits(budget: Budget, image_bytes: int, shape: KvShape, tokens: int) -> bool:
    """By trying: a sequence of so many tokens beside the weights."""
    ledger = books(budget, budget.pages)
    if isinstance(ledger.pool.take("weights", budget.weight_pages(image_bytes)), NoPages):
        return False
    count = shape.blocks_for(tokens)
    return not any(isinstance(pool.alloc(shape, count), NoBlocks) for pool in (ledger.device, ledger.host))


@given(st.integers(4, 20), st.integers(1, 4 * PAGE), SHAPES, st.integers(3, 12), st.integers(2, 3))
def test_the_longest_sequence_is_the_longest_that_fits(
    pages: int, image_bytes: int, shape: KvShape, host_slabs: int, instances: int
) -> None:
    budget = Budget(pages=pages, page_bytes=PAGE, slab_bytes=SLAB, host_slabs=host_slabs, instances=instances)
    limit = budget.sequence_tokens(image_bytes, shape)
    assert limit <= 0 or fits(budget, image_bytes, shape, limit)
    assert not fits(budget, image_bytes, shape, max(limit, 0) + 1)


@given(st.integers(4, 20), st.integers(1, 4 * PAGE), SHAPES, st.integers(0, 12))
def test_what_a_device_holds_is_no_matter_of_the_host(
    pages: int, image_bytes: int, shape: KvShape, host_slabs: int
) -> None:
    budget = Budget(pages=pages, page_bytes=PAGE, slab_bytes=SLAB, host_slabs=host_slabs, instances=2)
    roomy = replace(budget, host_slabs=100)
    held = budget.device_tokens(image_bytes, shape)
    assert held == roomy.sequence_tokens(image_bytes, shape) >= budget.sequence_tokens(image_bytes, shape)


@pytest.mark.parametrize("short", [0, 1])
@given(st.integers(1, 8 * PAGE), SHAPES)
def test_no_token_can_be_made_with_fewer_than_the_least_pages(short: int, image_bytes: int, shape: KvShape) -> None:
    ledger = books(BUDGET, BUDGET.least_pages(image_bytes) - short)
    spec = make_spec(0, image_pages=1, block_bytes=shape.block_bytes)
    ledger.add_model(spec)
    assert not isinstance(ledger.pool.take("weights", BUDGET.weight_pages(image_bytes)), NoPages)
    assert isinstance(ledger.device.alloc(shape, 1), NoBlocks) == bool(short)


@pytest.mark.parametrize(("nbytes", "pages"), [(1, 1), (PAGE - 1, 1), (PAGE, 1), (PAGE + 1, 2)])
def test_an_image_takes_whole_pages(nbytes: int, pages: int) -> None:
    assert BUDGET.weight_pages(nbytes) == pages


def test_a_block_larger_than_a_slab_holds_nothing() -> None:
    assert BUDGET.sequence_tokens(PAGE, make_shape(2 * SLAB)) == 0


def test_what_leaves_no_room_for_a_slab_cannot_be_served() -> None:
    assert BUDGET.sequence_tokens(11 * PAGE, make_shape(SLAB)) <= 0
