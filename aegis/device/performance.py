"""The speed of a device by its own figures, from which estimates begin until steps are measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aegis.core.estimators import Hardware

if TYPE_CHECKING:
    from aegis.device.cuda.driver import Driver


def figures(kind: str, *, ordinal: int = 0, driver: Driver | None = None) -> Hardware:
    """The figures of a device of this kind. Every processor counts as a slow one: `Hardware` as it is.

    Raises UserError if the machine has no such GPU.
    """
    if kind != "cuda":
        return Hardware()
    from aegis.device.cuda import driver as cuda_driver
    from aegis.device.cuda.figures import of_gpu

    return of_gpu(cuda_driver.Gpu(driver or cuda_driver.Driver(), ordinal))
