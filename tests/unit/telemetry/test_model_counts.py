"""Tallies of several proxies are one server's."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import astuple

from aegis.core.ids import ModelId
from aegis.telemetry.model_counts import Tally, lasting, total

NUMBERS = len(Tally.__struct_fields__) - 1
tallies = st.builds(
    lambda model, numbers: Tally(ModelId(model), *numbers),
    st.sampled_from("abc"),
    st.lists(st.integers(0, 1000), min_size=NUMBERS, max_size=NUMBERS),
)


@given(st.lists(tallies))
def test_a_total_is_the_sum_of_each_number_by_model(told: list[Tally]) -> None:
    sums = total(told)
    assert set(sums) == {tally.model for tally in told}
    for model, summed in sums.items():
        columns = zip(*(astuple(tally)[1:] for tally in told if tally.model == model), strict=True)
        assert astuple(summed)[1:] == tuple(map(sum, columns))


@given(st.lists(tallies))
def test_what_lasts_is_all_but_what_there_was_at_the_moment(told: list[Tally]) -> None:
    for before, after in zip(told, lasting(told), strict=True):
        assert (after.waiting, after.running) == (0, 0)
        assert astuple(after)[3:] == astuple(before)[3:]
