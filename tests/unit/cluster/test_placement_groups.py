"""The resources that a cluster lacks, in words; and the GPUs of an instance whose node is lost."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from aegis.cluster import placement_groups
from aegis.cluster.placement_groups import PlacementGroups, missing_room
from aegis.cluster.ray_cluster import Cluster
from aegis.core.ids import InstanceId


@pytest.mark.parametrize(
    ("need", "count", "free"),
    [
        ({"CPU": 1.0}, 3, [{"CPU": 2.0}, {"CPU": 1.0}]),
        ({"CPU": 0.5}, 4, [{"CPU": 2.0}]),
        ({"GPU": 2.0}, 2, [{"GPU": 2.0, "CPU": 8.0}, {"GPU": 3.0}]),
    ],
)
def test_what_fits_lacks_nothing(need: dict[str, float], count: int, free: list[dict[str, float]]) -> None:
    assert missing_room(need, count, free) == ""


@pytest.mark.parametrize(
    ("need", "count", "free", "told"),
    [
        ({"CPU": 1.0}, 16, [{"CPU": 2.0}], ["1 node ", "2 CPU", "each of 16 instances", "1 CPU", "14 is missing"]),
        (
            {"GPU": 2.0},
            2,
            [{"GPU": 1.0}, {"GPU": 3.0}],
            ["2 nodes", "1 GPU; 3 GPU", "each of 2 instances needs 2 GPU", "1 is missing"],
        ),
        ({"GPU": 1.0}, 1, [{"CPU": 8.0}], ["0 GPU", "1 instance needs 1 GPU", "1 is missing"]),
        ({"GPU": 1.0}, 1, [], ["0 nodes", "nothing"]),
    ],
)
def test_what_is_missing_is_told(
    need: dict[str, float], count: int, free: list[dict[str, float]], told: list[str]
) -> None:
    missing = missing_room(need, count, free)
    assert all(part in missing for part in told), missing


def test_a_group_of_gpus_is_on_one_node() -> None:
    assert missing_room({"GPU": 2.0}, 1, [{"GPU": 1.0}, {"GPU": 1.0}])


def test_a_node_that_is_lost_before_it_says_its_gpus_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error would end the server."""
    ray = pytest.importorskip("ray", reason="no Ray; pip install -e '.[ray]'")
    instance, answers = InstanceId("mixed-0"), [ray.exceptions.GetTimeoutError(), ray.exceptions.WorkerCrashedError()]

    def get(_reference: object, *, timeout: float) -> list[int]:
        if answers:
            raise answers.pop(0)
        return [3]

    task = SimpleNamespace(options=lambda **_: task, remote=lambda: None)
    monkeypatch.setattr(ray, "remote", lambda _function: task)
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(placement_groups, "_ASKED_AGAIN_S", 0.0)
    monkeypatch.setattr(PlacementGroups, "_node", lambda *_: "a-node")
    placement = PlacementGroups(Cluster("127.0.0.1", "a-node", "local"), {"GPU": 1.0})
    placement._bundles[instance] = placement_groups._Bundle(cast(Any, None), 0, 1)
    assert asyncio.run(placement.node(instance)) == ("a-node", [3])
