"""The division of memory and the names of instances that follow from a configuration."""

from __future__ import annotations

from aegis.config.config import Config
from aegis.core.ids import InstanceId
from aegis.core.role import Role, Roles
from aegis.policies import recipe


def host_slabs_of(config: Config) -> int:
    """The host slabs of each rank: the part of the host memory beside the model cache is for KV."""
    ranks = config.instances.tensor_parallel_size
    return (config.memory.host - config.memory.cache_bytes) // config.memory.slab // ranks


def slab_shortage(slabs: int, instances: int) -> str:
    """Advice if there are too few host slabs for so many instances; empty if there are enough."""
    if slabs >= 2 * instances:
        return ""
    return (
        f"--host-memory without --model-cache holds {slabs} KV slabs, {instances} instances need "
        f"{2 * instances}; raise it"
    )


def instances_of(config: Config) -> dict[InstanceId, Role]:
    """The instances by name, in order."""
    sizes = config.instances
    if sizes.mixed or recipe(config.scheduling.policy).roles_of(sizes.roles, counted=sizes.counted) is Roles.AUTO:
        counts = {Role.MIXED: sizes.count}
    else:
        counts = {Role.PREFILL: sizes.prefill, Role.DECODE: sizes.decode}
    return {InstanceId(f"{role}-{i}"): role for role, count in counts.items() for i in range(count)}
