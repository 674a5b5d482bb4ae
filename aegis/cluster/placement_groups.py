"""The node of the cluster that each instance is on: Ray's choice, in one placement group that spreads over the nodes,
and in a group of its own for an instance that joins."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from aegis.cluster.ray_cluster import Cluster, alive, ended, not_run_there
from aegis.core.errors import UserError
from aegis.core.ids import InstanceId

_PLACED_S = 30.0
_ASKED_AGAIN_S = 0.25
_TIMEOUTS_MAX = 4
"""Of a node that Ray does not take for lost, which it does within a minute."""


@dataclass(frozen=True, slots=True)
class _Bundle:
    """Number `at` of a placement group of `size`."""

    group: Any
    at: int
    size: int


class PlacementGroups:
    """A bundle is an instance's until it leaves. Ray places it anew when its node dies."""

    def __init__(self, cluster: Cluster, need: Mapping[str, float]) -> None:
        self._cluster = cluster
        self._need = dict(need)
        self._bundles: dict[InstanceId, _Bundle] = {}
        self._spare: list[_Bundle] = []  # of a group that others are in

    async def reserve(self, instances: Sequence[InstanceId]) -> None:
        """Bundles for all of them or none. Raises UserError that says what there is and what is missing."""
        spare = [self._spare.pop() for _ in instances[: len(self._spare)]]
        try:
            missing = len(instances) - len(spare)
            bundles = await asyncio.to_thread(self._reserve, missing) if missing else []
        except UserError:
            self._spare += spare
            raise
        self._bundles.update(zip(instances, spare + bundles, strict=True))

    async def give_back(self, instance: InstanceId) -> None:
        """The instance is not started any more: its bundle serves others."""
        bundle = self._bundles.pop(instance)
        if bundle.size > 1:
            self._spare.append(bundle)
        else:
            await asyncio.to_thread(_remove, bundle.group)

    async def node(self, instance: InstanceId) -> tuple[str, list[str]]:
        """The node of its bundle now, and the GPUs of that node that are in it, as Ray names them. Waits while the
        bundle has no node, or that is lost. Raises UserError, also where the node says nothing."""
        timeouts = 0
        while True:
            node = await asyncio.to_thread(self._node, instance)
            try:
                gpus = await asyncio.to_thread(self._gpus, instance) if node else None
            except TimeoutError:
                gpus, timeouts = None, timeouts + 1
            if node and gpus is not None:
                return node, gpus
            if not node:
                timeouts = 0
            if timeouts == _TIMEOUTS_MAX:
                raise UserError(
                    f"a node of the Ray cluster has not said within {timeouts * _PLACED_S:.0f} s which GPUs "
                    f"{instance} has there; `ray status` and Ray's logs on node {node} say why"
                )
            await asyncio.sleep(_ASKED_AGAIN_S)

    async def release(self) -> None:
        bundles = [*self._bundles.values(), *self._spare]
        for group in {bundle.group.id: bundle.group for bundle in bundles}.values():
            await ended(partial(_remove, group))

    def _reserve(self, count: int) -> list[_Bundle]:
        missing = missing_room(self._need, count, _free())
        if missing:
            raise UserError(f"the Ray cluster ({self._cluster.name}) {missing}", param="ray")
        from ray.util import placement_group

        group = placement_group([self._need] * count, strategy="SPREAD")
        if not group.wait(_PLACED_S):
            _remove(group)
            raise UserError(
                f"the Ray cluster ({self._cluster.name}) has not placed the instances within {_PLACED_S:.0f} s: others "
                "may have taken what was free; try again, or ask for less",
                param="ray",
            )
        return [_Bundle(group, at, count) for at in range(count)]

    def _node(self, instance: InstanceId) -> str | None:
        from ray.util import placement_group_table

        bundle = self._bundles[instance]
        node = placement_group_table(bundle.group)["bundles_to_node_id"].get(bundle.at)
        return node if node in alive() else None

    def _gpus(self, instance: InstanceId) -> list[str] | None:
        """A task that asks for all of a bundle's GPUs gets these, and no other process does while the bundle is
        ours. None if its node is lost, which Ray may not have noticed yet. Raises TimeoutError, UserError."""
        if "GPU" not in self._need:
            return []
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = self._bundles[instance]
        placed = PlacementGroupSchedulingStrategy(bundle.group, placement_group_bundle_index=bundle.at)
        task = ray.remote(_own_gpus).options(num_cpus=0, num_gpus=self._need["GPU"], scheduling_strategy=placed)
        try:
            given: list[str] = ray.get(task.remote(), timeout=_PLACED_S)
        except ray.exceptions.RayTaskError as error:
            raise not_run_there(error) from None
        except ray.exceptions.GetTimeoutError:
            raise TimeoutError from None
        except ray.exceptions.RayError:
            return None
        return given


def _remove(group: Any) -> None:
    from ray.util import remove_placement_group

    remove_placement_group(group)


def _own_gpus() -> list[str]:
    """Of a node that was started with CUDA_VISIBLE_DEVICES they are the numbers, or UUIDs, that this holds."""
    import ray

    return [str(gpu) for gpu in ray.get_gpu_ids()]


def missing_room(need: Mapping[str, float], count: int, free: Sequence[Mapping[str, float]]) -> str:
    """The room that nodes with so much `free` lack for `count` instances that `need` this each; empty if they have
    it."""
    fit = sum(min(int(node.get(kind, 0) / amount + 1e-6) for kind, amount in need.items()) for node in free)
    if fit >= count:
        return ""
    each = ", ".join(f"{amount:g} {kind}" for kind, amount in need.items())
    has = "; ".join(", ".join(f"{node.get(kind, 0):g} {kind}" for kind in need) for node in free)
    who = "1 instance needs" if count == 1 else f"each of {count} instances needs"
    nodes = f"{len(free)} node{'s' if len(free) != 1 else ''}"
    return (
        f"has {nodes} with this free: {has or 'nothing'}; {who} {each}, on one node: room for "
        f"{count - fit} is missing; add nodes, or ask for fewer instances"
    )


def _free() -> list[dict[str, float]]:
    """The free resources of each node now."""
    from ray._private.state import available_resources_per_node

    nodes = alive()
    return [dict(free) for node, free in available_resources_per_node().items() if node in nodes]
