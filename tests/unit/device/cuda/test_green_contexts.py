"""Lanes of the CUDA device over a model of the driver: which divisions it offers, and what it gives back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from aegis.device.cuda.driver import CudaError
from aegis.device.cuda.green_contexts import GreenLane
from aegis.device.divisions import WHOLE
from aegis.device.shared_events import SharedWords
from tests.unit.device.cuda_driver_model import DriverModel
from tests.unit.device.cuda_driver_types import CUdevice_attribute, SmResource
from tests.unit.device.cuda_parts import Rig


@pytest.fixture
def rig(words: SharedWords) -> Iterator[Rig]:
    rig = Rig(words)
    yield rig
    rig.close()


def with_sms(rig: Rig, sms: SmResource) -> None:
    rig.next_model = lambda: _model(sms)


def _model(sms: SmResource) -> DriverModel:
    model = DriverModel()
    model.sms = sms
    return model


def sms_of(lanes: tuple[GreenLane, ...]) -> list[int]:
    return [lane.sms for lane in lanes]


def test_lanes_have_the_multiprocessors_of_their_shares_and_streams_of_their_own(rig: Rig) -> None:
    with_sms(rig, SmResource(132, 8, 8))
    device = rig.open()
    whole, *divisions = device.partitions()
    assert whole == WHOLE
    assert divisions[0] == (121, 879)
    assert divisions[-1] == (848, 152)
    for shares in divisions:
        lanes = device.lanes(shares)
        assert sum(sms_of(lanes)) == 132
        assert [lane.share for lane in lanes] == list(shares)
        assert sms_of(lanes)[0] == pytest.approx(0.132 * shares[0], abs=0.5)
        assert lanes[0].stream != lanes[1].stream
        for lane in lanes:
            lane.enter()
            lane.close()
    assert rig.models[0].held()["green_contexts"] == 0
    assert rig.models[0].held()["streams"] == 1, "that of moves"
    assert device.device_wide == 0


@pytest.mark.parametrize(("capability", "first"), [((9, 0), 8), ((8, 6), 10), ((7, 5), 10)])
def test_what_an_older_driver_does_not_tell_follows_from_the_gpu(
    rig: Rig, capability: tuple[int, int], first: int
) -> None:
    def model() -> DriverModel:
        made = _model(SmResource(84))
        major, minor = capability
        made.attributes[CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR] = major
        made.attributes[CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR] = minor
        return made

    rig.next_model = model
    share = round(1000 * first / 84)
    assert rig.open().partitions()[1] == (share, 1000 - share)


def test_a_small_gpu_cannot_be_divided(rig: Rig) -> None:
    with_sms(rig, SmResource(14, 8, 8))
    device = rig.open()
    assert device.partitions() == (WHOLE,)
    with pytest.raises(KeyError):
        device.lanes((500, 500))


@pytest.mark.parametrize(
    "error", [AttributeError("no such name"), RuntimeError('Function "cuDeviceGetDevResource" not found')]
)
def test_an_old_driver_offers_no_division(rig: Rig, error: Exception) -> None:
    class Old(DriverModel):
        def cuDeviceGetDevResource(self, *_: object) -> tuple[int]:
            raise error

    rig.next_model = Old
    assert rig.open().partitions() == (WHOLE,)


def test_a_driver_that_refuses_offers_no_division(rig: Rig) -> None:
    def model() -> DriverModel:
        made = DriverModel()
        made.failing["cuDeviceGetDevResource"] = 1
        return made

    rig.next_model = model
    assert rig.open().partitions() == (WHOLE,)


@pytest.mark.parametrize("call", ["cuDevResourceGenerateDesc", "cuGreenCtxCreate", "cuGreenCtxStreamCreate"])
def test_what_was_made_before_the_driver_refuses_is_given_back(rig: Rig, call: str) -> None:
    device = rig.open()
    model, shares = rig.models[0], device.partitions()[1]
    before = model.held()
    model.failing[call] = 1
    with pytest.raises(CudaError, match=call):
        device.lanes(shares)
    assert model.held() == before


@pytest.mark.parametrize("call", ["cuDevResourceGenerateDesc", "cuGreenCtxCreate", "cuGreenCtxStreamCreate"])
def test_divisions_that_the_driver_refuses_to_make_are_not_offered(rig: Rig, call: str) -> None:
    device = rig.open()
    model = rig.models[0]
    before = model.held()
    model.failing[call] = 1_000
    assert device.partitions() == (WHOLE,)
    assert model.held() == before


def test_a_second_lane_that_is_refused_takes_the_first_with_it(rig: Rig) -> None:
    class Once(DriverModel):
        def cuGreenCtxCreate(self, *arguments: object) -> tuple[object, ...]:
            if self.green_contexts:
                self.failing["cuGreenCtxCreate"] = 1
            made: tuple[object, ...] = super().cuGreenCtxCreate(*arguments)
            return made

    with_sms(rig, SmResource(132, 8, 8))
    shares = rig.open().partitions()[1]
    rig.next_model = Once
    device = rig.open()
    before = rig.models[1].held()
    with pytest.raises(CudaError):
        device.lanes(shares)
    assert rig.models[1].held() == before
    assert device.partitions() == (WHOLE,), "as it refuses all of them"
