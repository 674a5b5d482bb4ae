"""A change of model, by phase."""

from __future__ import annotations

from aegis.core.messages import SwitchDone
from aegis.core.switching import Switching
from aegis.sim.faults.fake_models import make_spec

SPEC = make_spec(0, image_pages=3, block_bytes=1024)
M, NBYTES = SPEC.model, SPEC.manifest.image_bytes


def test_a_load_is_told_apart_from_making_room_and_from_waiting_for_kv() -> None:
    switching = Switching(M, 100)
    switching.loading_ns = 130
    switching.loaded(190)
    switching.loaded(500)
    assert switching.done(250, SPEC) == SwitchDone(M, False, 30, 60, 60, NBYTES)


def test_a_prefetched_model_costs_only_the_rest_of_its_copy() -> None:
    switching = Switching(M, 100)
    switching.loaded(100)
    assert switching.done(100, SPEC) == SwitchDone(M, True, 0, 0, 0, NBYTES)
    late = Switching(M, 100)
    late.loaded(120)
    assert late.done(125, SPEC) == SwitchDone(M, True, 0, 20, 5, NBYTES)


def test_the_phases_add_up() -> None:
    switching = Switching(M, 7, loading_ns=11, loaded_ns=40)
    done = switching.done(55, SPEC, 1.5)
    assert done.make_room_ns + done.copy_ns + done.kv_ns == 55 - 7
    assert done.work_share == 1.5
