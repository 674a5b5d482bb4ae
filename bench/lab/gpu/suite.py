"""The speed of a GPU: moving memory, activating models, decoding, each beside the hardware's own limit in the same run.

`python -m bench.lab.gpu.suite --json FILE` prints a table and writes FILE, with the GPU's name and the date. It needs
no network and no checkpoint. Not run on a GPU yet. On a machine without one it says so and ends with code 3.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from msgspec import Struct
from rich.console import Console
from rich.table import Table

from aegis.core.errors import UserError
from aegis.device.cuda.driver import Driver, Gpu
from bench.common import result_files
from bench.common.figures import Figure


def why_no_gpu() -> str | None:
    """The reason why this machine cannot run what needs a GPU, in one line; None if it can."""
    try:
        Gpu(Driver(), 0)
    except UserError as error:
        return error.message.removeprefix("there is no usable GPU 0: ")
    import torch

    if not torch.cuda.is_available():
        return f"torch {torch.__version__} has no CUDA"
    return None


NO_GPU = 3


class Result(Struct, frozen=True):
    gpu: str
    gpu_memory_bytes: int
    date: str
    torch: str
    driver: int
    figures: tuple[Figure, ...]


def measure(*, tiny: bool = False) -> Iterator[Figure]:
    """All figures, one after the other. `tiny` uses small models: to see that everything runs."""
    from bench.lab.gpu import decoding, moving

    with tempfile.TemporaryDirectory() as directory:
        yield from moving.figures(Path(directory), tiny=tiny)
        yield from decoding.figures(Path(directory), tiny=tiny)


def run(json_path: Path | None, *, tiny: bool = False) -> int:
    """The exit code: 0, 1 where a figure is not what it has to be, NO_GPU where there is none."""
    if reason := why_no_gpu():
        sys.stderr.write(f"no usable GPU: {reason}\n")
        return NO_GPU
    import torch

    device = torch.cuda.get_device_properties(0)
    figures = []
    try:
        result_files.prepare(json_path)
        for figure in measure(tiny=tiny):
            figures.append(figure)
            print(f"{figure.name}: {figure.value:.4g} {figure.unit}", flush=True)
    except UserError as error:
        sys.stderr.write(f"{error.message}\n")
        return 1
    result = Result(
        gpu=device.name,
        gpu_memory_bytes=device.total_memory,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        torch=torch.__version__,
        driver=Driver()("cuDriverGetVersion"),
        figures=tuple(figures),
    )
    _show(result)
    if json_path is not None:
        result_files.write_json(json_path, result)
    return 0 if tiny or all(figure.ok is not False for figure in figures) else 1


def _show(result: Result) -> None:
    table = Table(title=f"{result.gpu}, {result.date[:10]}")
    for title in ("figure", "value", "unit", "has to be", ""):
        table.add_column(title, justify="right" if title == "value" else "left")
    marks = {None: "", True: "yes", False: "NO"}
    for each in result.figures:
        table.add_row(each.name, f"{each.value:.4g}", each.unit, each.wanted, marks[each.ok])
    Console(width=110).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tiny", action="store_true", help="small models: to see that everything runs")
    options = parser.parse_args()
    return run(options.json, tiny=options.tiny)


if __name__ == "__main__":
    sys.exit(main())
