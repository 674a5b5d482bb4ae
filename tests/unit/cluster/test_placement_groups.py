"""The resources that a cluster lacks, in words; and the GPUs of an instance whose node is lost."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from aegis.cluster import placement_groups
from aegis.cluster.placement_groups import PlacementGroups, missing_room
from aegis.cluster.ray_cluster import Cluster
from aegis.core.errors import UserError
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


INSTANCE = InstanceId("mixed-0")


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the node's task returns or raises when it is asked, in order."""
    ray = pytest.importorskip("ray", reason="no Ray; pip install -e '.[ray]'")
    found: list[Any] = []

    def get(_reference: object, *, timeout: float) -> list[str]:
        answer = found.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return cast(list[str], answer)

    task = SimpleNamespace(options=lambda **_: task, remote=lambda: None)
    monkeypatch.setattr(ray, "remote", lambda _function: task)
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(placement_groups, "_ASKED_AGAIN_S", 0.0)
    monkeypatch.setattr(PlacementGroups, "_node", lambda *_: "a-node")
    return found


def node_of_instance() -> tuple[str, list[str]]:
    placement = PlacementGroups(Cluster("127.0.0.1", "local"), {"GPU": 1.0})
    placement._bundles[INSTANCE] = placement_groups._Bundle(cast(Any, None), 0, 1)
    return asyncio.run(placement.node(INSTANCE))


@pytest.mark.parametrize("gpus", [[4, 5], ["GPU-8932f937"]])
def test_gpus_have_the_names_that_their_node_has(gpus: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """UUIDs where the node was started with these."""
    ray = pytest.importorskip("ray", reason="no Ray; pip install -e '.[ray]'")
    monkeypatch.setattr(ray, "get_gpu_ids", lambda: gpus)
    assert placement_groups._own_gpus() == [str(gpu) for gpu in gpus]


def test_a_node_that_is_lost_before_it_says_its_gpus_is_waited_for(answers: list[Any]) -> None:
    """An error would end the server."""
    from ray.exceptions import GetTimeoutError, WorkerCrashedError

    answers += [GetTimeoutError(), WorkerCrashedError(), ["3"]]
    assert node_of_instance() == ("a-node", ["3"])


def test_a_node_that_never_says_its_gpus_is_not_asked_for_ever(answers: list[Any]) -> None:
    from ray.exceptions import GetTimeoutError

    answers += [GetTimeoutError()] * 9
    with pytest.raises(UserError, match=r"not said within 120 s which GPUs mixed-0 has .* on node a-node say why"):
        node_of_instance()
    assert len(answers) == 5


def test_a_node_without_aegis_says_so(answers: list[Any]) -> None:
    from ray.exceptions import RayTaskError

    missing = RuntimeError("failed to import:\n\nTraceback\nModuleNotFoundError: No module named 'aegis'\n")
    answers.append(RayTaskError("_own_gpus", "a traceback", missing))
    with pytest.raises(UserError, match="cannot run aegis: ModuleNotFoundError: No module named 'aegis'; install"):
        node_of_instance()
