"""The reasons why a model can never be served with the memory that there is, with how much it takes."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from aegis.core.model import ModelSpec
from aegis.node.model_fit import misfit
from aegis.sim.faults.fake_models import PAGE, make_spec
from memory.budget import Budget

SPEC = make_spec(0, image_pages=3, block_bytes=PAGE // 4)


def budget(*, pages: int, host_slabs: int = 8, instances: int = 1) -> Budget:
    return Budget(pages=pages, page_bytes=PAGE, slab_bytes=PAGE, host_slabs=host_slabs, instances=instances)


def test_the_least_memory_is_enough() -> None:
    assert misfit(SPEC, budget(pages=4)) == ""
    assert misfit(SPEC, budget(pages=4, host_slabs=3, instances=3)) == ""


@pytest.mark.parametrize(
    ("spec", "given", "told"),
    [
        (SPEC, budget(pages=2), "a device holds {2} MiB; raise --device-memory to {4}MiB at least"),
        (SPEC, budget(pages=3), "has no room for a slab of KV; raise --device-memory to {4}MiB at least"),
        (
            SPEC,
            budget(pages=4, host_slabs=2, instances=3),
            "2 slabs of KV in host memory are no more than the other 2 instances keep, one each; raise --host-memory",
        ),
    ],
)
def test_what_is_lacking_is_told(spec: ModelSpec, given: Budget, told: str) -> None:
    mib = [pages * PAGE >> 20 for pages in range(5)]
    assert misfit(spec, given).endswith(told.format(*mib))


def test_a_block_larger_than_a_slab_is_told() -> None:
    kv = replace(SPEC.manifest.kv, block_tokens=SPEC.manifest.kv.block_tokens * 8)
    spec = replace(SPEC, manifest=replace(SPEC.manifest, kv=kv))
    assert misfit(spec, budget(pages=9)).endswith("; raise --slab")
