"""The assumed speed of devices before anything is measured."""

from __future__ import annotations

import pytest

from aegis.core.errors import UserError
from aegis.core.estimators import Hardware
from aegis.device.cuda.driver import Driver
from aegis.device.performance import figures
from aegis.sim.gpu_costs import GPUS
from tests.unit.device.cuda_driver_model import DriverModel
from tests.unit.device.cuda_driver_types import CUdevice_attribute


def gpu(capability: tuple[int, int], **said: int) -> Driver:
    major, minor = capability
    model = DriverModel()
    for name, value in {"COMPUTE_CAPABILITY_MAJOR": major, "COMPUTE_CAPABILITY_MINOR": minor, **said}.items():
        model.attributes[CUdevice_attribute[f"CU_DEVICE_ATTRIBUTE_{name}"]] = value
    return Driver(model)


H100 = {"MULTIPROCESSOR_COUNT": 132, "CLOCK_RATE": 1_980_000}
H100_MEMORY = {"MEMORY_CLOCK_RATE": 2_619_000, "GLOBAL_MEMORY_BUS_WIDTH": 5120}
A10 = {"MULTIPROCESSOR_COUNT": 72, "CLOCK_RATE": 1_695_000}
A10_MEMORY = {"MEMORY_CLOCK_RATE": 6_251_000, "GLOBAL_MEMORY_BUS_WIDTH": 384}


@pytest.mark.parametrize(
    ("name", "driver"),
    [
        ("h100", gpu((9, 0), **H100, **H100_MEMORY)),
        ("h100", gpu((9, 0), **H100)),
        ("a10", gpu((8, 6), **A10, **A10_MEMORY)),
    ],
    ids=["h100", "h100 without clocks of memory", "a10"],
)
def test_a_gpu_is_taken_for_what_the_simulator_takes_it_for(name: str, driver: Driver) -> None:
    found, simulated = figures("cuda", driver=driver), GPUS[name].hardware()
    assert found.memory_bytes_per_s == pytest.approx(simulated.memory_bytes_per_s, rel=0.1)
    assert found.copy_bytes_per_s == pytest.approx(simulated.copy_bytes_per_s, rel=0.1)
    assert found.flops_per_s == pytest.approx(simulated.flops_per_s, rel=0.1)
    assert found.overhead_ns == pytest.approx(simulated.overhead_ns, rel=0.1)


def test_one_that_says_nothing_of_itself_is_an_old_one() -> None:
    old, newer = (figures("cuda", driver=gpu(capability)) for capability in ((7, 5), (8, 0)))
    assert 0 < old.copy_bytes_per_s < newer.copy_bytes_per_s
    assert 0 < old.flops_per_s < newer.flops_per_s and 0 < old.memory_bytes_per_s < newer.memory_bytes_per_s


def test_a_processor_is_a_slow_device() -> None:
    assert figures("cpu") == Hardware()


def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(UserError, match="no usable GPU 3"):
        figures("cuda", ordinal=3, driver=gpu((9, 0)))
