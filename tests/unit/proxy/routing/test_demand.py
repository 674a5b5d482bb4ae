"""The share of an instance that requests want."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from aegis.core.estimators import Hardware, Latency
from aegis.core.model import Slo
from aegis.sim.faults.fake_models import PAGE, make_spec
from memory.budget import Budget
from proxy.routing.demand import NOTHING, Demand, demand

PARTS = st.builds(Demand, *[st.integers(0, 10**7)] * 3)


@given(st.lists(PARTS))
def test_what_has_left_wants_nothing(parts: list[Demand]) -> None:
    total = NOTHING
    for part in parts:
        total = total.instead(NOTHING, part)
    for part in parts:
        total = total.instead(part, NOTHING)
    assert total == NOTHING


def test_loads_count_as_far_as_memory_does_not_hold_everything() -> None:
    assert Demand(300_000, 800_000, 1_000_000).load_ppm == 300_000
    assert Demand(300_000, 800_000, 2_000_000).load_ppm == 700_000, "half of it has to be brought in again"


def test_a_step_every_tbt_and_a_load_every_ttft() -> None:
    slow, fast = (
        make_spec(1, image_pages=3, block_bytes=PAGE, slo=Slo(scale * 10**10, scale * 10**8)) for scale in (2, 1)
    )
    latency = Latency(fast.manifest, Hardware())
    wanted, relaxed = demand(fast, latency, 1000, 500), demand(slow, latency, 1000, 500)
    assert wanted.steps_ppm == 10**6 * latency.decode_ns(500) // 10**8
    assert wanted.loads_ppm == 10**6 * latency.switch_ns() // 10**10
    assert abs(wanted.steps_ppm - 2 * relaxed.steps_ppm) <= 1
    assert demand(fast, latency, 1000, 1000).memory_ppm == 1_000_000, "all that fits"


def test_weights_of_a_model_without_kv_are_a_part_of_the_device() -> None:
    made = make_spec(1, image_pages=3, block_bytes=PAGE)
    spec = replace(made, manifest=replace(made.manifest, kv=replace(made.manifest.kv, layers=())))
    budget = Budget(pages=300, page_bytes=PAGE, slab_bytes=PAGE, host_slabs=1, instances=1)
    held = budget.device_tokens(spec.manifest.image_bytes, spec.manifest.kv)
    memory_ppm = demand(spec, Latency(spec.manifest, Hardware()), held, 0).memory_ppm
    assert 9_990 < memory_ppm <= 10_000, "three pages of 300"
