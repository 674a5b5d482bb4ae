"""Which GPUs there are, by models of the driver and of NVML."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from aegis.core.errors import UserError
from aegis.device.cuda.driver import Driver
from aegis.device.cuda.gpus import VisibleGpu, driver_version, visible
from tests.unit.device.cuda_driver_model import DriverModel

GIB = 1 << 30


class NvmlError(Exception):
    pass


@dataclass
class NvmlModel:
    """All GPUs of a machine by their bus ids; `silent` are functions that they do not have."""

    free_bytes: dict[str, int]
    there: bool = True
    silent: frozenset[str] = frozenset()

    NVMLError = NvmlError

    def nvmlInit(self) -> None:
        self._demand(self.there)

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.65.06"

    def nvmlDeviceGetHandleByPciBusId(self, bus_id: str) -> str:
        self._demand(bus_id in self.free_bytes)
        return bus_id

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        self._demand("memory" not in self.silent)
        return SimpleNamespace(free=self.free_bytes[handle])

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: str) -> int:
        self._demand("pcie" not in self.silent)
        return 5

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: str) -> int:
        return 16

    def nvmlDeviceGetNvLinkState(self, handle: str, link: int) -> int:
        self._demand(link < 4)
        return int(link != 2)

    def _demand(self, well: bool) -> None:
        if not well:
            raise NvmlError


def driver(gpus: int) -> Driver:
    model = DriverModel()
    model.gpus = gpus
    return Driver(model)


def test_gpus_are_those_of_the_driver_with_what_nvml_says_of_them() -> None:
    nvml = NvmlModel({"0000:08:00.0": 70 * GIB, "0000:07:00.0": 90 * GIB, "0000:09:00.0": GIB})
    assert visible(driver(2), nvml) == (
        VisibleGpu(0, "Model 0", 80 * GIB, 80 * GIB, (5, 16), 3),
        VisibleGpu(1, "Model 1", 80 * GIB, 70 * GIB, (5, 16), 3),
    )
    assert driver_version(nvml) == "580.65.06"


@pytest.mark.parametrize(
    ("nvml", "found"),
    [
        (NvmlModel({}, there=False), VisibleGpu(0, "Model 0", 80 * GIB)),
        (NvmlModel({}), VisibleGpu(0, "Model 0", 80 * GIB)),
        (
            NvmlModel({"0000:07:00.0": GIB}, silent=frozenset({"memory", "pcie"})),
            VisibleGpu(0, "Model 0", 80 * GIB, None, None, 3),
        ),
    ],
    ids=["no nvml", "another machine's", "one that tells little"],
)
def test_without_nvml_the_driver_is_enough(nvml: NvmlModel, found: VisibleGpu) -> None:
    assert visible(driver(1), nvml) == (found,)


def test_no_gpu_is_a_line() -> None:
    with pytest.raises(UserError, match="no usable GPU: the driver shows none"):
        visible(driver(0))
    broken = DriverModel()
    broken.failing["cuInit"] = 1
    with pytest.raises(UserError, match="no usable GPU: cuInit"):
        visible(Driver(broken))
