"""The resources that a cluster lacks, in words."""

from __future__ import annotations

import pytest

from aegis.cluster.placement_groups import missing_room


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
