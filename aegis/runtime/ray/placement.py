"""Which node of the cluster each instance is on: Ray's choice, in one placement group that spreads over the nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from aegis.core.errors import UserError
from aegis.core.ids import InstanceId
from aegis.runtime.ray.cluster import Cluster, alive

_PLACED_S = 30.0
_ASKED_AGAIN_S = 0.25


class Placement:
    """A bundle of the group is an instance's as long as the market lasts. Ray places it anew when its node dies."""

    def __init__(self, instances: Sequence[InstanceId], need: Mapping[str, float]) -> None:
        self._bundles = {instance: at for at, instance in enumerate(instances)}
        self._need = dict(need)
        self._group: Any = None

    async def reserve(self, cluster: Cluster) -> None:
        """All bundles or none. Raises UserError that says what there is and what is missing."""
        await asyncio.to_thread(self._reserve, cluster)

    async def node(self, instance: InstanceId) -> tuple[str, list[int]]:
        """Where its bundle is now, and which GPUs of that node are in it. Waits while that is nowhere."""
        while True:
            node = await asyncio.to_thread(self._node, instance)
            if node:
                return node, await asyncio.to_thread(self._gpus, instance)
            await asyncio.sleep(_ASKED_AGAIN_S)

    async def release(self) -> None:
        if self._group is not None:
            from ray.util import remove_placement_group

            await asyncio.to_thread(remove_placement_group, self._group)

    def _reserve(self, cluster: Cluster) -> None:
        missing = missing_room(self._need, len(self._bundles), _free())
        if missing:
            raise UserError(f"the Ray cluster ({cluster.name}) {missing}", param="ray")
        from ray.util import placement_group

        self._group = placement_group([self._need] * len(self._bundles), strategy="SPREAD")
        if not self._group.wait(_PLACED_S):
            raise UserError(
                f"the Ray cluster ({cluster.name}) has not placed the instances within {_PLACED_S:.0f} s: others may "
                "have taken what was free; try again, or ask for less",
                param="ray",
            )

    def _node(self, instance: InstanceId) -> str | None:
        from ray.util import placement_group_table

        placed = placement_group_table(self._group)["bundles_to_node_id"]
        node = placed.get(self._bundles[instance])
        return node if node in alive() else None

    def _gpus(self, instance: InstanceId) -> list[int]:
        """A task that asks for all of a bundle's is given these, and nobody else is while the bundle is ours."""
        if "GPU" not in self._need:
            return []
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        placed = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=self._bundles[instance])
        task = ray.remote(_own_gpus).options(num_cpus=0, num_gpus=self._need["GPU"], scheduling_strategy=placed)
        given: list[int] = ray.get(task.remote(), timeout=_PLACED_S)
        return given


def _own_gpus() -> list[int]:
    import ray

    return [int(gpu) for gpu in ray.get_gpu_ids()]


def missing_room(need: Mapping[str, float], count: int, free: Sequence[Mapping[str, float]]) -> str:
    """What nodes with so much `free` lack for `count` instances that `need` this each; empty where they have it."""
    fit = sum(min(int(node.get(kind, 0) / amount + 1e-6) for kind, amount in need.items()) for node in free)
    if fit >= count:
        return ""
    each = ", ".join(f"{amount:g} {kind}" for kind, amount in need.items())
    has = "; ".join(", ".join(f"{node.get(kind, 0):g} {kind}" for kind in need) for node in free)
    nodes = f"{len(free)} node{'s' if len(free) != 1 else ''}"
    return (
        f"has {nodes} with this free: {has or 'nothing'}; {count} instances need {each} each, on one node: room for "
        f"{count - fit} is missing; add nodes, or ask for fewer instances"
    )


def _free() -> list[dict[str, float]]:
    """What each node has free now."""
    from ray._private.state import available_resources_per_node

    nodes = alive()
    return [dict(free) for node, free in available_resources_per_node().items() if node in nodes]
