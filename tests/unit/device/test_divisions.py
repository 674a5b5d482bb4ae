"""The divisions of a device into two lanes: which shares there are, and what they stand for."""

from __future__ import annotations

import pytest

from aegis.device.divisions import two_lanes


def test_a_single_core_cannot_be_divided() -> None:
    assert two_lanes(1) == {}


def test_few_cores_are_divided_in_every_way() -> None:
    assert two_lanes(2) == {(500, 500): 1}
    assert two_lanes(3) == {(333, 667): 1, (667, 333): 2}


@pytest.mark.parametrize(("sms", "least", "step"), [(132, 8, 8), (108, 4, 2), (144, 8, 8), (16, 8, 8), (15, 8, 8)])
def test_each_lane_has_as_many_multiprocessors_as_the_driver_gives(sms: int, least: int, step: int) -> None:
    divisions = two_lanes(sms, least=least, step=step)
    assert len(divisions) <= 12
    assert bool(divisions) == (sms >= 2 * least)
    for shares, first in divisions.items():
        assert first % step == 0 and first >= least and sms - first >= least
        assert sum(shares) == 1000
        assert shares[0] == pytest.approx(1000 * first / sms, abs=0.5)


@pytest.mark.parametrize("cores", [16, 64, 96, 256])
def test_many_cores_are_divided_in_about_eight_ways(cores: int) -> None:
    assert 6 <= len(two_lanes(cores)) <= 9
