"""Which devices the instances run on, where the configuration leaves it to the machine: a person with GPUs means all of
them, and their memory."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata

from aegis.config.config import Config
from aegis.config.sizes import format_size
from aegis.core.errors import UserError
from aegis.core.role import Role
from aegis.core.wording import count
from aegis.device.cuda.gpus import VisibleGpu, visible
from aegis.node.sizing import instances_of

_OF_FREE = 0.9
"""Of the memory that is free: the rest is for what CUDA and torch keep beside it."""

_ON_A_PROCESSOR = 2
"""Processes of instances that hinder each other little, since each of them also waits."""

_CONTEXT_BYTES = 512 << 20
"""About what the CUDA context and the libraries of one process take of a GPU's memory."""


def on_this_machine(config: Config) -> tuple[Config, tuple[VisibleGpu, ...]]:
    """`config` with a kind of device, their number and their memory, and the GPUs, if they are used.

    Raises UserError: there is no such device, or not so much of it.
    """
    if config.device == "cpu":
        return config, ()
    try:
        gpus = visible()
    except UserError as error:
        if config.device == "cuda" and not config.ray.address:
            raise UserError(f"--device cuda: {error.message}", param="device") from None
        gpus = ()
    if config.device == "auto" and missing_cuda():
        gpus = ()
    return with_gpus(config, gpus), gpus


def missing_cuda() -> str:
    """Why this torch cannot use a GPU, with what to do; empty if it can."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return "torch is not installed"
    if "+cpu" in version:
        return f"torch {version} is made for CPUs only; install a torch with CUDA (docs/installing.md)"
    return ""


def with_gpus(config: Config, gpus: Sequence[VisibleGpu]) -> Config:
    """As the configuration says; where it does not, all `gpus`, with nine tenths of what is free on each.

    Raises UserError if it asks for more than there is, or for more instances than their GPUs can carry.
    """
    kind = config.device if config.device != "auto" else "cuda" if gpus else "cpu"
    config = config.model_copy(update={"device": kind})
    if kind == "cpu" or not gpus:
        return config
    least_bytes = min(_free_bytes(gpu) for gpu in gpus)
    if "device" not in config.memory.model_fields_set:
        device_bytes = int(least_bytes * _OF_FREE) // config.memory.slab * config.memory.slab
        config = config.model_copy(update={"memory": config.memory.model_copy(update={"device": device_bytes})})
    if config.ray.address:
        return config
    if "devices" not in config.instances.model_fields_set:
        sizes = config.instances.model_copy(update={"devices": len(gpus)})
        config = config.model_copy(update={"instances": sizes})
    _refuse_too_much(config, gpus, least_bytes)
    return config


def dealt(config: Config, gpus: Sequence[VisibleGpu]) -> str:
    """What the user is told of it."""
    if not gpus:
        return ""
    instances, devices = len(instances_of(config)), config.device_count * config.instances.tensor_parallel_size
    on_each = -(-instances // config.device_count)
    each = "one on each" if on_each == 1 else f"up to {on_each} on each"
    memory = f"{format_size(config.memory.device)} of each for weights and KV"
    return f"{instances} instances on {devices} of {len(gpus)} GPUs ({gpus[0].name}), {each}; {memory}"


def counts_ignored(config: Config) -> str:
    """That all instances are mixed although it was said how many prefill and how many decode; empty if they are not."""
    sizes, roles = config.instances, instances_of(config)
    if not sizes.counted or Role.MIXED not in roles.values():
        return ""
    return (
        f"all {len(roles)} instances prefill and decode, as policy {config.scheduling.policy} has it or --roles auto: "
        f"--prefill {sizes.prefill} and --decode {sizes.decode} only say how many; --roles fixed keeps them apart"
    )


def crowded(config: Config, processors: int) -> str:
    """That far more processes of instances run than there are processors; empty if it is not so, or not here."""
    processes = len(instances_of(config)) * config.instances.tensor_parallel_size
    longer = processes / processors
    if config.device != "cpu" or config.ray.address or longer <= _ON_A_PROCESSOR:
        return ""
    return (
        f"{processes} processes of instances share {count(processors, 'processor')}: while all are busy, steps take "
        f"about {longer:.2g} times as long; as many as there are processors waste nothing"
    )


def _refuse_too_much(config: Config, gpus: Sequence[VisibleGpu], least_bytes: int) -> None:
    wanted, memory_bytes = config.instances.devices, config.memory.device
    if wanted > len(gpus):
        raise UserError(f"--devices {wanted}: there are {len(gpus)} GPUs; leave it out to use all", param="devices")
    if memory_bytes > least_bytes:
        raise UserError(
            f"--device-memory {format_size(memory_bytes)}: a GPU has {format_size(least_bytes)} free; leave it out, or "
            f"say {format_size(int(least_bytes * _OF_FREE))} at most",
            param="device_memory",
        )
    on_each = -(-len(instances_of(config)) // config.device_count)
    carried = (least_bytes - memory_bytes) // _CONTEXT_BYTES
    if on_each > max(carried, 1):
        raise UserError(
            f"{on_each} instances on one GPU: each takes about {format_size(_CONTEXT_BYTES)} beside --device-memory "
            f"{format_size(memory_bytes)}, so {max(carried, 1)} fit; have {max(carried, 1) * config.device_count} "
            "instances at most, or less --device-memory",
            param="device_memory",
        )


def _free_bytes(gpu: VisibleGpu) -> int:
    return gpu.memory_bytes if gpu.free_bytes is None else gpu.free_bytes
