"""Whether this machine can run what needs a GPU."""

from __future__ import annotations

from aegis.core.errors import UserError
from aegis.device.cuda.driver import Driver, Gpu


def why_no_gpu() -> str | None:
    """Why it cannot, in one line; None if it can."""
    try:
        Gpu(Driver(), 0)
    except UserError as error:
        return error.message.removeprefix("there is no usable GPU 0: ")
    import torch

    if not torch.cuda.is_available():
        return f"torch {torch.__version__} has no CUDA"
    return None
