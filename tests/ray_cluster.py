"""The Ray cluster of two nodes, for tests; they are skipped where there is no Ray."""

from __future__ import annotations

import pytest

pytest.importorskip("ray", reason="no Ray; pip install -e '.[ray]'")

from bench.lab.cluster.ray_nodes import RayCluster, RayNode, ray_cluster

__all__ = ["RayCluster", "RayNode", "of_ray", "ray_cluster"]


def of_ray(cluster: RayCluster) -> dict[str, str]:
    """What a driver's environment has to have to connect to it."""
    return {name: value for name, value in cluster.environment.items() if name.startswith("RAY_")}
